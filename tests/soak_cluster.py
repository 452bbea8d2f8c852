"""A cluster whose workers are killed, stopped and started again at random, each with a clock of its own.

Every round trains the same steps, which one undisturbed cluster trains too; both must end with the same bits.
"""

import collections
import contextlib
import random
import shutil
import signal
import time

import clusters
import jobs
import numpy as np
import soak_workload

STEPS = 300  # of a run
TIMEOUT_SECS = 4
PATIENCE_SECS = 600  # for a step, once no more faults come; a busy machine may take minutes to import TensorFlow
OPTIONS = jobs.TOY | dict(
    workload="soak_workload:LATE", num_gpus=1, log_every_steps=1, summary_every_steps=10, save_every_steps=10,
    keep_checkpoints=4, eval_every_steps=70, max_steps=STEPS, wait_for_workers=True, worker_timeout_secs=TIMEOUT_SECS,
    stall_timeout_secs=60,
)  # fmt: skip
PAUSE_SECS = 0.05  # of a disturbed worker's batch
MOST_SECS_AHEAD = 7200
MOST_FAULTS_AT_ONCE = 3  # without a step between them


class Lost(Exception):
    """A worker ended by itself, or nobody does a step."""


class Round:
    """One run from its beginning to its end, under faults.

    Args:
      draw: random numbers.
      folder: for its files, which is to be made.
      workers: how many.
      counts: counts faults, by name.
    """

    FAULTS = {"kill": 10, "kill all": 2, "stop": 10, "stop all": 1, "stop and kill": 4, "SIGTERM": 2, "SIGUSR1": 1}
    options = OPTIONS

    def __init__(self, draw, folder, workers, counts):
        folder.mkdir()
        self._draw, self._folder, self.train_dir = draw, folder, folder / "run"
        self._counts = counts
        self._hosts = ",".join(clusters.hosts(workers))
        self._running = {}

    def run(self):
        """Trains to the last step; raises Lost if it does not get there."""
        with contextlib.ExitStack() as self._stack:
            for index in range(len(self._hosts.split(","))):
                self._step_clock(index)
                self._start(index)
            try:
                while not self._is_over():
                    self._disturb()
                    self._await_step()
                self._await(self._has_ended, "the end")
            finally:
                self._collect()
        status = self._running[0].process.poll()
        if status != 0:
            raise Lost(f"the chief left with {status}:\n{self._running[0].text}")

    def _disturb(self):
        for _ in range(self._draw.randint(1, MOST_FAULTS_AT_ONCE)):
            time.sleep(self._draw.choice([0, 0.5, 2, 8]) * self._draw.random())
            if self._is_over():
                return
            kind = self._draw.choices(list(self.FAULTS), self.FAULTS.values())[0]
            getattr(self, "_" + kind.replace(" ", "_").lower())()
            if self._draw.random() < 0.5:
                self._step_clock(self._any())

    def _kill(self, *indices):
        indices = indices or [self._any()]
        for index in indices:
            self._end(index, signal.SIGKILL)
        for index in indices:
            time.sleep(self._draw.choice([0, 0, TIMEOUT_SECS * 2]) * self._draw.random())
            self._start(index)

    def _kill_all(self):
        self._kill(*self._shuffled())

    def _stop(self, *indices, meanwhile=lambda: None):
        indices = indices or [self._any()]
        for index in indices:
            self._counts["SIGSTOP"] += 1
            self._send(index, signal.SIGSTOP)
        time.sleep(self._draw.choice([0.5, 3 * TIMEOUT_SECS]) * self._draw.random())
        meanwhile()
        for index in indices:
            self._send(index, signal.SIGCONT)

    def _stop_all(self):
        self._stop(*self._shuffled())

    def _stop_and_kill(self):
        """One is stopped, and one, perhaps the same, killed while it is."""
        self._stop(meanwhile=self._kill)

    def _sigterm(self):
        """Workers that train end after the same step, at once or later; one that waits for others, by the signal."""
        first = self._any()
        self._end(first, signal.SIGTERM)
        self._start(first)

    def _sigusr1(self):
        """Only once the signal has a handler."""
        if 0 in self._running and "step " in self._running[0].output():
            self._send(0, signal.SIGUSR1)

    def _any(self):
        return self._draw.choice(list(self._running))

    def _shuffled(self):
        return self._draw.sample(list(self._running), len(self._running))

    def _start(self, index):
        words = jobs.flags(**self.options, train_dir=self.train_dir, worker_hosts=self._hosts, task_index=index)
        variables = {soak_workload.CLOCK: str(self._folder / f"clock{index}")} | self.environment(index)
        self._running[index] = self._stack.enter_context(jobs.Trainer(*words, **variables))
        self._counts["starts"] += 1

    def environment(self, index):
        """Of a worker."""
        return {soak_workload.PAUSE_SECS: str(PAUSE_SECS)}

    def look(self):
        """Called again and again while the workers train."""

    def _step_clock(self, index):
        ahead = self._draw.choice([-1, 1]) * self._draw.uniform(0, MOST_SECS_AHEAD)
        soak_workload.set_clock(self._folder / f"clock{index}", ahead)
        self._counts["clock steps"] += 1

    def _send(self, index, number):
        with contextlib.suppress(ProcessLookupError):
            self._running[index].process.send_signal(number)

    def _end(self, index, number):
        worker = self._running[index]
        self._send(index, number)
        self._counts[number.name] += 1
        status = worker.process.wait(PATIENCE_SECS)
        if status not in (-number, 0) and not self._was_told_to_end(status):
            raise Lost(f"a worker left with {status}:\n{worker.output()}")
        self._note_end(worker)

    def _was_told_to_end(self, status):
        """Returns whether a status is that of workers of which one got SIGTERM."""
        return status == 128 + signal.SIGTERM and self._counts["SIGTERM"]

    def _note_end(self, worker):
        worker.text = worker.output()
        self._counts["restarts by themselves"] += worker.text.count("Starting again")
        if "Traceback" in worker.text:
            raise Lost(f"a traceback:\n{worker.text}")

    def _collect(self):
        for worker in self._running.values():
            self._note_end(worker)

    def _is_over(self):
        return jobs.logged_step(self.train_dir) >= STEPS or self._has_ended()

    def _has_ended(self):
        return 0 in self._running and self._running[0].process.poll() is not None

    def _await_step(self):
        """Until a step is logged after now, by the same or another start; a start itself may cut records off."""
        sizes = [self._logged_bytes()]

        def has_grown():
            sizes.append(self._logged_bytes())
            return sizes[-1] > sizes[-2] or self._is_over()

        self._await(has_grown, f"a step, {sizes[0]} bytes being logged")

    def _logged_bytes(self):
        path = self.train_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _await(self, condition, what):
        deadline = time.monotonic() + PATIENCE_SECS
        while not condition():
            self.look()
            if time.monotonic() > deadline:
                outputs = "\n".join(f"--- {index}:\n{each.output()}" for index, each in self._running.items())
                raise Lost(f"waiting for {what}:\n{outputs}")
            for index, worker in list(self._running.items()):
                if self._was_told_to_end(worker.process.poll()):
                    self._note_end(worker)
                    self._start(index)
                elif worker.process.poll() not in (None, 0):
                    raise Lost(f"worker {index} left with {worker.process.poll()}:\n{worker.output()}")
            time.sleep(0.02)


def mismatches(train_dir, undisturbed):
    """Counts the variables, records of metrics.jsonl and points of curves differ in any bit, are missing or doubled."""
    one, two = jobs.variables(train_dir, STEPS), jobs.variables(undisturbed, STEPS)
    differing = sum(not np.array_equal(one.get(name), two.get(name)) for name in one.keys() | two.keys())
    points = [points_of_curve(folder) for folder in (train_dir, undisturbed)]
    for some, others in ((jobs.metrics_but_times(train_dir), jobs.metrics_but_times(undisturbed)), points):
        differing += abs(len(some) - len(others)) + sum(a != b for a, b in zip(some, others, strict=False))
    return differing


def points_of_curve(folder):
    """(step, value) of the loss as TensorBoard sees it."""
    return [(event.step, event.value) for event in jobs.events(folder).Scalars("total_loss")]


def soak(minutes, seed, workers, folder):
    """Returns (figures in one line, whether all is well)."""
    draw, counts, jobs.WAIT_SECS = random.Random(seed), collections.Counter(), PATIENCE_SECS
    with clusters.Cluster(folder / "undisturbed", workers, **OPTIONS) as cluster:
        if any(cluster.end(*range(workers))):
            raise SystemExit("\n".join(cluster.outputs()))
    began, rounds, differing, lost = time.monotonic(), 0, 0, []
    while time.monotonic() < began + 60 * minutes:
        each = Round(draw, folder / f"round{rounds}", workers, counts)
        rounds += 1
        try:
            each.run()
        except Lost as error:
            lost.append(str(error))
            print(f"round {rounds - 1}: {error}", flush=True)
            continue
        different = mismatches(each.train_dir, folder / "undisturbed")
        differing += different
        print(f"round {rounds - 1}: {dict(counts)}, {different} mismatches", flush=True)
        if not different:
            shutil.rmtree(folder / f"round{rounds - 1}")
    listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    minutes = (time.monotonic() - began) / 60
    return (
        f"soak of {workers} workers: seed {seed}, {minutes:.0f} minutes, {rounds} runs of {STEPS} steps, {listed}; "
        f"{len(lost)} runs lost, {differing} mismatches"
    ), not lost and not differing
