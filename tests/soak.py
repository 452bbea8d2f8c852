"""Disturbs runs at random; each must end as the run that nobody touched.

scripts/soak [--minutes M] [--seed S] kills one process, damages its checkpoints and fills its disk. With --workers N
it kills, stops and continues the workers of a cluster, among strangers and garbage on its board; with --elastic MIN:MAX
beside it workers return later. Each process has a clock of its own, which is set back and forth. It prints a line for
each run, then one of figures, and leaves with 0 if nothing was lost, repeated or different. The seed fixes what
happens, not at which instruction a signal arrives.

scripts/soak --steps N does N steps undisturbed instead, and leaves with 0 if neither memory nor open files grew.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import clusters  # noqa: E402
import elastic_log  # noqa: E402
import endurance  # noqa: E402
import forked  # noqa: E402
import jobs  # noqa: E402
import numpy as np  # noqa: E402
import small_disk  # noqa: E402
import soak_workload  # noqa: E402
import tensorflow as tf  # noqa: E402

# {what: how often, in proportion: in a run of one process, of a cluster, of an elastic one}
DISTURBANCES = {
    "kill": (8, 10, 10),
    "kill several": (0, 2, 2),
    "kill chief": (0, 0, 1),  # of an elastic cluster the others are killed much more often
    "stop": (0, 10, 3),
    "stop several": (0, 1, 0),
    "stop and kill": (0, 4, 0),
    "SIGTERM": (1, 2, 4),
    "SIGINT": (1, 0, 0),
    "stray": (0, 4, 4),
    "garbage": (0, 4, 4),
    "damage": (3, 0, 0),
    "full disk": (1, 0, 0),
}
DAMAGES = "flipped bit", "truncated", "emptied", "missing data", "list", "leftovers"  # of a checkpoint, of the run
MOST_AT_ONCE = 3  # without a step between them
TIMEOUT_SECS = 4  # of workers
PATIENCE_SECS = 600  # for a step, once nothing more happens; a busy machine may take minutes to import TensorFlow
LATEST_SECS = 40  # after which a worker of an elastic cluster returns
MOST_SECS_AHEAD = 7200
DISK_MEGABYTES = 64
_SAVING = dict(log_every_steps=1, save_every_steps=10, keep_checkpoints=4)
_WORKERS = dict(worker_timeout_secs=TIMEOUT_SECS, stall_timeout_secs=60)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Runs of one kind: their column of DISTURBANCES, steps, options and pauses of a batch and before a disturbance.

    Attributes:
      logs: whether the log says what was trained on.
      is_exact: whether the run must be the undisturbed one to the bit, or to 1e-9.
    """

    column: int
    steps: int
    batch_secs: tuple[float, ...]
    pause_secs: tuple[float, ...]
    options: dict
    logs: bool = True
    is_exact: bool = True


ALONE = Kind(
    0, 300, (0.01,), (0, 0.1, 1),
    jobs.TOY | _SAVING | dict(workload="soak_workload", summary_every_steps=10, eval_every_steps=70),
)  # fmt: skip
CLUSTER = Kind(
    1, 300, (0.05,), (0, 0.5, 2, 8),
    jobs.TOY | _SAVING | _WORKERS | dict(
        workload="soak_workload:LATE", num_gpus=1, summary_every_steps=10, eval_every_steps=70, wait_for_workers=True,
    ), logs=False,
)  # fmt: skip
ELASTIC = Kind(
    2, 100, (0.02, 0.1), (0, 0.5, 2, 8),
    _SAVING | _WORKERS | dict(
        workload="soak_workload:ELASTIC", dtype="float64", optimizer="momentum", learning_rate=0.05, clip_gradients=0.5,
        moving_average_decay=0.9, num_gpus=1, batch_size=3, summary_every_steps=0, check_data=False,
        check_towers="never",
    ), is_exact=False,
)  # fmt: skip


class Lost(Exception):
    """A process ended by itself, or nobody does a step."""


class Round:
    """One run from its beginning to its end, disturbed until a time.

    Args:
      kind: of run.
      draw: random numbers.
      folder: for its files, which is to be made.
      disk: a small file system for the run itself; None if there is none to fill.
      workers: how many.
      options: of the trainer, beside those of the kind.
      counts: counts what happened, by name.
      end: when nothing more is to happen.
    """

    def __init__(self, kind, draw, folder, disk, workers, options, counts, end):
        folder.mkdir()
        self._kind, self._draw, self._folder, self._disk, self._counts = kind, draw, folder, disk, counts
        self.train_dir, self.log, self._end_at = (disk or folder) / "run", folder / "log", end
        self._options = kind.options | options | dict(train_dir=self.train_dir, max_steps=kind.steps)
        if workers > 1:
            self._options["worker_hosts"] = ",".join(clusters.hosts(workers))
        self._weights = {what: shares[kind.column] for what, shares in DISTURBANCES.items()}
        self._weights["full disk"] *= disk is not None
        self._count, self._running, self._returns = workers, {}, {}  # {worker: its process}, {worker: when}
        self._strays = []

    def run(self):
        """Trains to the last step; raises Lost if it does not get there."""
        with contextlib.ExitStack() as self._stack:
            for index in range(self._count):
                self._step_clock(index)
                self._start(index)
            try:
                while not self._is_over():
                    self._disturb()
                    self._await_step()
                    if time.monotonic() > self._end_at:
                        break
                self._await(lambda: self._status(0) == 0, "the end")
            finally:
                for worker in self._running.values():
                    self._note_end(worker)

    def _disturb(self):
        for _ in range(self._draw.randint(1, MOST_AT_ONCE)):
            time.sleep(self._draw.choice(self._kind.pause_secs) * self._draw.random())
            if self._is_over():
                return
            what = self._draw.choices(list(self._weights), self._weights.values())[0]
            getattr(self, "_" + what.replace(" ", "_").lower())()
            if self._draw.random() < 0.5:
                self._step_clock(self._draw.choice(list(self._running) or [0]))

    # The disturbances.

    def _kill(self, *indices):
        indices = indices or self._some(1)
        for index in indices:
            self._end(index, signal.SIGKILL)
        for index in indices:
            self._start_again(index)

    def _kill_several(self):
        self._kill(*self._some(2 if self._is_elastic else self._count))

    def _kill_chief(self):
        self._kill(0)

    def _stop(self, *indices, meanwhile=lambda: None):
        indices = indices or self._some(1)
        for index in indices:
            self._counts["SIGSTOP"] += 1
            self._send(index, signal.SIGSTOP)
        time.sleep(self._draw.choice([0.5, 3 * TIMEOUT_SECS]) * self._draw.random())
        meanwhile()
        for index in indices:
            self._send(index, signal.SIGCONT)

    def _stop_several(self):
        self._stop(*self._some(self._count))

    def _stop_and_kill(self):
        """One is stopped, and one, perhaps the same, killed while it is."""
        self._stop(meanwhile=self._kill)

    def _sigterm(self, number=signal.SIGTERM):
        """Workers that train end after the same step, at once or later; one that waits for others, by the signal."""
        for index in self._some(1):
            self._end(index, number if self._running[index].output() else signal.SIGKILL)  # not while Python starts
            self._start_again(index)

    def _sigint(self):
        self._sigterm(signal.SIGINT)

    def _stray(self):
        """A worker that has another list of workers, and perhaps other options, comes to a place that may be taken."""
        self._counts["strays"] += 1
        hosts = [*self._options["worker_hosts"].split(",")[:-1], *clusters.hosts(1)]
        changes = self._draw.choice([dict(learning_rate=0.5), dict(seed=5), {}]) | dict(worker_hosts=",".join(hosts))
        self._strays.append(self._trainer(self._count - 1, **changes))

    def _garbage(self):
        self._counts["garbage"] += 1
        with contextlib.suppress(tf.errors.OpError):  # there may be no chief
            clusters.write_garbage(self._options["worker_hosts"].partition(",")[0])

    def _damage(self):
        """Between two starts the newest checkpoint or TensorFlow's list of them is damaged, or something is left."""
        self._end(0, signal.SIGKILL)
        what, last = self._draw.choice(DAMAGES), f"model.ckpt-{max(jobs.saved_steps(self.train_dir), default=0)}"
        index, data = (self.train_dir / f"{last}.{end}" for end in ("index", "data-00000-of-00001"))
        if what == "list" and self.train_dir.exists():
            (self.train_dir / "checkpoint").write_bytes(self._draw.randbytes(self._draw.randrange(60)))
        elif what == "leftovers" and self.train_dir.exists():
            (self.train_dir / f"model.ckpt-{jobs.ENDLESS}.data-00000-of-00001").write_bytes(b"half")
        elif len(jobs.saved_steps(self.train_dir)) < 3:
            what = "nothing to damage"
        elif what == "missing data":
            data.unlink()
        else:
            path = self._draw.choice([index, data])
            content = bytearray(path.read_bytes())
            place = self._draw.randrange(1, len(content))
            content[place] ^= 1 << self._draw.randrange(8)
            path.write_bytes({"flipped bit": content, "truncated": content[:place], "emptied": b""}[what])
        self._counts[what] += 1
        self._start(0)

    def _full_disk(self):
        """For a while nothing more can be written into the run."""
        self._counts["full disk"] += 1
        filler = small_disk.fill(self._disk)
        time.sleep(self._draw.uniform(0.05, 0.4))
        if self._draw.random() < 0.5:
            self._end(0, signal.SIGKILL)
        filler.unlink()
        if self._status(0) is not None:
            self._start(0)

    # The processes.

    @property
    def _is_elastic(self):
        return self._kind is ELASTIC

    def _some(self, count):
        """Indices of processes that are there; not the chief of an elastic cluster."""
        there = [index for index in self._running if index or not self._is_elastic]
        return self._draw.sample(there, min(count, len(there)))

    def _start(self, index):
        self._running[index] = self._trainer(index)
        self._counts["starts"] += 1

    def _trainer(self, index, **changes):
        task = {"task_index": index} if self._count > 1 else {}
        variables = {
            soak_workload.CLOCK: str(self._folder / f"clock{index}"), soak_workload.LOG: str(self.log),
            soak_workload.PAUSE_SECS: str(self._draw.choice(self._kind.batch_secs)),
        } | ({forked.FORK_AGAIN: "1"} if self._is_elastic else {})  # fmt: skip
        words = jobs.flags(**(self._options | task | changes))
        return self._stack.enter_context(jobs.Trainer(*words, **variables))

    def _start_again(self, index):
        if self._is_elastic:  # later
            del self._running[index]
            self._returns[index] = time.monotonic() + self._draw.choice([0, 5, LATEST_SECS]) * self._draw.random()
            return
        if self._count > 1:
            time.sleep(self._draw.choice([0, 0, TIMEOUT_SECS * 2]) * self._draw.random())
        self._start(index)

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
        if status not in (-number, 0) and not self._may_end_with(status):
            raise Lost(f"a process left with {status}:\n{worker.output()}")
        self._note_end(worker)

    def _may_end_with(self, status):
        """Returns whether a status is that of processes of which one got SIGTERM or SIGINT, or whose disk was full."""
        causes = {143: "SIGTERM", 130: "SIGINT", 2: "full disk", 4: "full disk"}
        return self._counts[causes.get(status, "")] > 0

    def _note_end(self, worker):
        worker.text = worker.output()
        self._counts["restarts by themselves"] += worker.text.count("Starting again")
        if "Traceback" in worker.text:
            raise Lost(f"a traceback:\n{worker.text}")

    def _status(self, index):
        return self._running[index].process.poll() if index in self._running else None

    def _is_over(self):
        return jobs.logged_step(self.train_dir) >= self._kind.steps or self._status(0) == 0

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
            for index in [index for index, when in self._returns.items() if time.monotonic() > when]:
                del self._returns[index]
                self._start(index)
            if time.monotonic() > deadline:
                outputs = "\n".join(f"--- {index}:\n{each.output()}" for index, each in self._running.items())
                raise Lost(f"waiting for {what}:\n{outputs}")
            for index, worker in list(self._running.items()):
                if self._may_end_with(worker.process.poll()):
                    self._note_end(worker)
                    self._start(index)
                elif worker.process.poll() not in (None, 0):
                    raise Lost(f"worker {index} left with {worker.process.poll()}:\n{worker.output()}")
            if any(stray.process.poll() not in (None, 2) for stray in self._strays):
                raise Lost("\n".join(stray.output() for stray in self._strays))
            time.sleep(0.02)


def mismatches(kind, one, two):
    """Counts the variables, the records of metrics.jsonl and the points of the curves that differ in two runs."""

    def differ(a, b):
        if a is None or b is None or kind.is_exact:
            return a != b if isinstance(a, dict) else not np.array_equal(a, b)
        a, b = ([x["examples"], x["loss"]] if isinstance(x, dict) else x for x in (a, b))
        return not np.allclose(a, b, rtol=1e-9, atol=1e-12)

    some, others = (jobs.variables(folder, kind.steps) for folder in (one, two))
    found = sum(differ(some.get(name), others.get(name)) for name in some.keys() | others.keys())
    some, others = jobs.metrics_but_times(one), jobs.metrics_but_times(two)
    logged = {record["step"]: record for record in others}
    found += sum(differ(record, logged.get(record["step"])) for record in some)
    found += len(some) - len({record["step"] for record in some})
    if kind is not ALONE:  # whose disk was full for some of them
        found += abs(len(some) - len(others))
    if kind is CLUSTER:
        points = [[(e.step, e.value) for e in jobs.events(folder).Scalars("total_loss")] for folder in (one, two)]
        found += points[0] != points[1]
    return found


def lost_or_repeated(kind, log, global_batch):
    """Counts the examples of the steps that count that were not trained on exactly once."""
    if not kind.logs:
        return 0
    trained, _ = elastic_log.trained(log, global_batch, kind.steps)
    counted = collections.Counter(position for positions in trained.values() for position in positions)
    return sum(counted[position] != 1 for position in range(kind.steps * global_batch)) + len(trained) - kind.steps


def train_undisturbed(kind, folder, workers, options):
    """Trains the run that nobody touches: one process, or for the same bits as many as are disturbed."""
    os.environ[soak_workload.LOG] = str(folder / "log of the undisturbed")
    options = kind.options | options | dict(max_steps=kind.steps)
    if kind is CLUSTER:
        with clusters.Cluster(folder / "undisturbed", workers, **options) as cluster:
            if any(cluster.end(*range(workers))):
                raise SystemExit("\n".join(cluster.outputs()))
        return
    if kind is ELASTIC:
        options["accumulate_steps"] = int(options.pop("elastic").partition(":")[2])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        jobs.train_toy(folder / "undisturbed", **options)


def soak(asked, folder, disk):
    """Returns (figures in one line, whether all is well)."""
    kind = ELASTIC if asked.elastic else CLUSTER if asked.workers > 1 else ALONE
    options = {"elastic": asked.elastic} if asked.elastic else {}
    towers = int(asked.elastic.partition(":")[2]) if asked.elastic else asked.workers * kind.options["num_gpus"]
    draw, counts, jobs.WAIT_SECS = random.Random(asked.seed), collections.Counter(), PATIENCE_SECS
    train_undisturbed(kind, folder, asked.workers, options)
    began, rounds, wrong, lost = time.monotonic(), 0, [0, 0], 0
    end = began + 60 * asked.minutes
    while time.monotonic() < end:
        each = Round(kind, draw, folder / f"run{rounds}", disk, asked.workers, options, counts, end)
        rounds += 1
        try:
            each.run()
        except Lost as error:
            lost += 1
            print(f"run {rounds - 1}: {error}", flush=True)
            break  # what is left of it shows why
        found = [lost_or_repeated(kind, each.log, towers * kind.options["batch_size"]),
                 mismatches(kind, each.train_dir, folder / "undisturbed")]  # fmt: skip
        wrong = [sum(both) for both in zip(wrong, found, strict=True)]
        print(f"run {rounds - 1}: {dict(counts)}, {found[0]} examples lost or repeated, {found[1]} mismatches",
              flush=True)  # fmt: skip
        if any(found):
            break
        shutil.rmtree(each.train_dir)
    listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    who = f"{asked.workers} workers" + (f", --elastic={asked.elastic}" if asked.elastic else "")
    return (
        f"soak{f' of {who}' if asked.workers > 1 else ''}: seed {asked.seed}, {(time.monotonic() - began) / 60:.0f} "
        f"minutes, {rounds} runs of {kind.steps} steps, {listed}; {lost} runs lost, {wrong[0]} examples lost or "
        f"repeated, {wrong[1]} mismatches"
    ), not lost and not any(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--elastic", default="")
    parser.add_argument("--steps", type=int, default=0)
    asked = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    with contextlib.ExitStack() as stack:
        if asked.steps:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                line, is_well = endurance.endure(asked.steps, folder / "run")
        else:
            has_disk = asked.workers == 1 and small_disk.can_mount(folder / "disk")
            disk = stack.enter_context(small_disk.mounted(folder / "disk", DISK_MEGABYTES)) if has_disk else None
            line, is_well = soak(asked, folder, disk)
        print(line)
        if not is_well:
            shutil.copytree(folder, f"{folder}-left")  # the disk goes
            print(f"What is left of it: {folder}-left", file=sys.stderr)
    shutil.rmtree(folder)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
