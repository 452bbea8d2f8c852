"""Runs that are disturbed at random, and what must be true of them all the same."""

import collections
import contextlib
import os
import random
import re
import signal
import time
from typing import NamedTuple
from unittest import mock

import clusters
import forked
import jobs
import numpy as np
import small_disk
import soak_workload
import tensorflow as tf

TIMEOUT_SECS = 5  # of workers; a busy machine may take seconds for a heartbeat
PATIENCE_SECS = 240  # for a step, once nothing more happens; a busy machine may take a minute to start workers
OPTIONS = clusters.NORM | dict(
    workload="soak_workload", save_every_steps=10, keep_checkpoints=4, eval_every_steps=40, summary_every_steps=10
)
WORKERS = dict(worker_timeout_secs=TIMEOUT_SECS, start_timeout_secs=100, stall_timeout_secs=60)


class Kind(NamedTuple):
    """Runs of so many workers and batches a step, with options beside OPTIONS; the status of workers that leave when
    one is missing, None if they start themselves again."""

    workers: int
    batches: int
    options: dict
    status: int | None = None


KINDS = {
    "alone": Kind(1, 2, dict(num_gpus=2)),
    "plain": Kind(2, 2, WORKERS, 138),
    "waiting": Kind(2, 2, WORKERS | dict(wait_for_workers=True)),
    "elastic": Kind(3, 2, WORKERS | dict(elastic="1:2")),
}
CLUSTERS = ("plain", "waiting", "elastic")
# {what happens: to which kinds of runs}, methods of Run.
DISTURBANCES = {
    **dict.fromkeys(("kill", "stop", "SIGTERM"), tuple(KINDS)),
    **dict.fromkeys(("SIGINT", "damaged checkpoint", "full disk"), ("alone",)),
    **dict.fromkeys(("stray", "wrong returner", "garbage in the store"), CLUSTERS),
    **dict.fromkeys(("cut connections", "duplicate", "lost packets"), CLUSTERS),
    **dict.fromkeys(("at a start", "at a first step", "at a save", "at an evaluation"), tuple(KINDS)),
}
NAMED = r"worker (\d+) \([^)]*\)(?:: worker \1 \([^)]*\))? "
# (pattern of a line with a worker's index, what must have been done to that one)
CLAIMS = (
    (NAMED + r"(?:is missing|is lost|has not started|has ended)", "touched"),
    (r"worker (\d+) \([^)]*\),? (?:has come, but |which )?is not reached", "touched"),
    (NAMED + r"(?:cannot train|trains already|cannot be started)", "wrong"),
    (r"(\*\*\* Ignored) a status of ", "garbage"),
    (r"(The connection) to another worker was lost", "touched"),
    (r"(The watch) over the workers has failed|(Traceback)", "never"),
)


class Lost(Exception):
    """A process ended as it may not, or nobody does a step."""


class Run:
    """One run from its beginning to its end, with trials between; `close` ends its processes.

    What was done since the last step is kept as (what, to whom): ("touched", "1"), ("status", 138).

    Args:
      kind: of run.
      draw: random numbers.
      folder: for its files, which is to be made.
      disk: a small file system for the run itself; None if there is none to fill.
      network: a network.Network with a machine for each worker, and one more; None: all are on this one.
    """

    def __init__(self, kind, draw, folder, disk=None, network=None):
        folder.mkdir()
        self._network = network
        self._kind, self._draw, self._folder, self._disk = kind, draw, folder, disk
        self.train_dir, self._log = (disk or folder) / "run", folder / "log"
        self._options = OPTIONS | kind.options | dict(train_dir=self.train_dir, max_steps=jobs.ENDLESS)
        self.hosts, self._stack = clusters.hosts(kind.workers), contextlib.ExitStack()
        if network:
            self.hosts = [f"{address}:2222" for address in network.addresses[: kind.workers]]
        self.running, self.due = {}, dict.fromkeys(range(kind.workers), 0)
        self._strays = []  # (index, process, whether it has the same command as the right one)
        self._starts = 0  # of right ones
        self._is_ending = False  # who leaves with 0 stays away
        self._done, self._done_before = {("touched", str(index)) for index in self.due}, set()  # nobody is there yet
        self._read = collections.Counter()  # characters of each process's output
        self.close = self._stack.close
        self.sizes = []  # in the end: numbers of workers of the starts that did a step

    def disturb(self, what):
        """Does it at some moment, and waits until all train again, except one time in four; Lost if they do not."""
        time.sleep(self._draw.choice([0, 0.3, 2]) * self._draw.random())
        if what.startswith("at a"):
            self._at(what)
        else:
            getattr(self, f"_{what.lower().replace(' ', '_')}")()
        if self._draw.random() < 0.75:
            self.await_step()

    def await_step(self):
        """Returns when all are there, strangers have gone, and a step is logged after now."""
        sizes = []

        def has_grown():
            if not self.due and not self._strays:  # a start may cut records off
                path = self.train_dir / "metrics.jsonl"
                sizes.append(path.stat().st_size if path.exists() else 0)
            return len(sizes) > 1 and sizes[-1] > sizes[-2]

        self._await(has_grown)
        self._look()
        garbage = {each for each in self._done if each[0] == "garbage"}  # stays until the row is written anew
        self._done, self._done_before = garbage, self._done

    def _await(self, condition, pause_secs=0.02):
        """Returns once it holds; starts meanwhile who is to start. Lost if that takes too long."""
        deadline = time.monotonic() + PATIENCE_SECS
        while not condition():
            self._tend()
            if time.monotonic() > deadline:
                raise Lost(f"nothing came of it in {PATIENCE_SECS} s{self._situation()}")
            time.sleep(pause_secs)

    def _situation(self):
        others = "".join(f"\n--- {index}:\n{each.output()[-2000:]}" for index, each in self.running.items())
        return f"; due: {self.due}, now: {time.monotonic():.0f}, done: {self._done_before}, {self._done}{others}"

    # The disturbances.

    def _kill(self):
        for index in self._some():
            self.end_one(index, signal.SIGKILL)

    def _stop(self):
        stopped = [self.running[index] for index in self._some()]
        for worker in stopped:
            worker.process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.choice([0.5, 3 * TIMEOUT_SECS]) * self._draw.random())
        if self._draw.random() < 0.3:
            self._kill()
        for worker in stopped:
            worker.process.send_signal(signal.SIGCONT)

    def _sigterm(self, number=signal.SIGTERM):
        """Workers that train end after the same step; one that waits for others, by the signal."""
        self.note("status", 128 + number, -number)
        for index in self._some(1):
            self.end_one(index, number)

    def _sigint(self):
        self._sigterm(signal.SIGINT)

    def _damaged_checkpoint(self):
        """Between two starts the newest checkpoint or TensorFlow's list of them is damaged."""
        self._kill()
        if len(steps := jobs.saved_steps(self.train_dir)) > 2:
            newest = f"model.ckpt-{steps[-1]}."
            name = self._draw.choice([f"{newest}index", f"{newest}data-00000-of-00001", "checkpoint"])
            content = (self.train_dir / name).read_bytes()
            changed = bytearray(content)
            changed[self._draw.randrange(len(content))] ^= self._draw.randrange(1, 256)
            cut = content[: self._draw.randrange(len(content))]
            (self.train_dir / name).write_bytes(self._draw.choice([changed, cut, self._draw.randbytes(50), b""]))
            if self._draw.random() < 0.2:
                (self.train_dir / name).unlink()

    def _full_disk(self):
        """For a while nothing more can be written into the run."""
        self.note("status", 2, 4)
        filler = small_disk.fill(self._disk)
        time.sleep(self._draw.uniform(0.05, 0.4))
        if self._draw.random() < 0.5:
            self._kill()
        filler.unlink()

    def _stray(self):
        """A worker of another cluster comes to a place that is taken, and touches nobody."""
        self.await_step()
        hosts = [*self.hosts[:-1], f"{self.hosts[-1].rpartition(':')[0]}:{clusters.hosts(1)[0].rpartition(':')[2]}"]
        self.come(self._kind.workers - 1, worker_hosts=",".join(hosts), learning_rate=0.5)

    def _duplicate(self):
        """The same command comes a second time: beside a living worker, twice for a dead one, or on another machine."""
        index, how = self._draw.randrange(self._kind.workers), self._draw.choice(["beside", "twice", "elsewhere"])
        if how == "elsewhere" and self._network:
            self.come(index, machine=self._kind.workers)
        elif how == "twice" and index in self.running:
            self.end_one(index, signal.SIGKILL, returns=False)
            self._start(index)
            self.come(index)
        else:
            self.await_step()
            self.come(index)

    def _lost_packets(self):
        """No packet comes from a worker's machine or to it, for some time; perhaps its command comes on another one."""
        cut = self._draw.randrange(self._kind.workers)
        self._touch(*range(self._kind.workers))  # each of both sides misses the other
        self._network.cut(cut)
        if cut and self._draw.random() < 0.3:  # a second chief would lock the train_dir, as that one may
            self.come(cut, machine=self._kind.workers)
        end = time.monotonic() + self._draw.choice([3, TIMEOUT_SECS + 3, 25]) * self._draw.uniform(0.8, 1)
        self._await(lambda: time.monotonic() > end)
        self._network.join(cut)

    def _at(self, phase):
        """One or all are killed, stopped or told to end in a phase of the run, and return."""
        if phase in ("at a start", "at a first step") and 0 in self.running:
            self.end_one(0, signal.SIGKILL)
        before = self._count(phase)
        self._await(lambda: self._count(phase) > before, 0.002)
        if phase == "at a start":
            time.sleep(8 * self._draw.random())
        self._draw.choice([self._kill, self._stop, self._sigterm])()

    def _count(self, phase):
        lines = self._log.read_text().splitlines() if phase in ("at a first step", "at an evaluation") else []
        return {
            "at a start": self._starts,
            "at a first step": len({line.split()[3] for line in lines if line.startswith("batch")}),
            "at a save": any(self.train_dir.glob("*.tempstate*")),
            "at an evaluation": lines.count("evaluation"),
        }[phase]

    def _wrong_returner(self):
        """A worker dies, and one with other options comes in its place before the right one."""
        index = self._draw.randrange(1, self._kind.workers)
        if index not in self.running:
            return
        self.end_one(index, signal.SIGKILL)
        self.due[index] = float("inf")
        if self._kind.status:  # who does not wait leaves for that
            self.note("status", 2)
        self.come(index, **self._draw.choice([dict(learning_rate=0.5), dict(seed=5), dict(batch_size=4)]))

    def _garbage_in_the_store(self):
        self.note("garbage", "*** Ignored")
        text = self._draw.choice([b"no status", b"", b"{}", b"[" * 9999, self._draw.randbytes(99)])
        with contextlib.suppress(tf.errors.OpError):  # there may be no chief
            clusters.write_to_store(self.hosts[0], text, [self._draw.randrange(self._kind.workers)])

    def _cut_connections(self):
        for path in [self._folder / f"cut{index}" for index in self._some()]:
            path.touch()
            deadline = time.monotonic() + 3  # it may be about to end
            while path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    # The processes.

    def _some(self, count=None):
        """Indices of a few of those that are there, which from now on may be said to be missing."""
        there = list(self.running)
        chosen = self._draw.sample(there, min(len(there), count or self._draw.choice([1, 1, 1, self._kind.workers])))
        self._touch(*chosen)
        return chosen

    def note(self, what, *whom):
        self._done |= {(what, each) for each in whom}

    def _touch(self, *indices):
        self.note("touched", *map(str, indices), "The connection")
        self.note("status", self._kind.status)

    def _start(self, index):
        self._starts += 1
        self.running[index] = self._trainer(index)

    def _trainer(self, index, machine=None, **changes):
        variables = {
            soak_workload.LOG: str(self._log),
            soak_workload.CUT: str(self._folder / f"cut{index}"),
            soak_workload.PAUSE_SECS: str(self._draw.choice((0.02, 0.1))),
        }
        if self._network:
            variables[forked.NETWORK] = self._network.namespace(index if machine is None else machine)
        task = dict(worker_hosts=",".join(self.hosts), task_index=index) if self._kind.workers > 1 else {}
        return self._stack.enter_context(
            jobs.Program("tower_train", *jobs.flags(**(self._options | task | changes)), **variables)
        )

    def come(self, index, machine=None, **changes):
        """Starts a wrong worker, which is refused, or one too many; returns it."""
        self.note("wrong", str(index))
        self._strays.append((index, self._trainer(index, machine, **changes), not changes))
        return self._strays[-1][1]

    def end_one(self, index, number, returns=True):
        """Sends a worker a signal and waits for its end; it is due to return after a while, or not at all."""
        self._touch(index)
        worker = self.running.pop(index)
        worker.process.send_signal(number)
        status = worker.process.wait(PATIENCE_SECS)
        if status != -signal.SIGKILL and ("status", status) not in self._done | self._done_before:
            raise Lost(f"worker {index} left with {status}:\n{worker.output()[-2000:]}{self._situation()}")
        self._look(worker)
        if returns:
            wait = 2 * TIMEOUT_SECS * self._draw.choice([0, 0, self._kind.workers > 1]) * self._draw.random()
            self.due[index] = time.monotonic() + wait

    def _tend(self):
        """Starts who is to start, and starts again who has left as it may; Lost if anyone left in another way."""
        for index in [index for index, when in self.due.items() if time.monotonic() > when]:
            del self.due[index]
            self._start(index)
        for index in [index for index, worker in self.running.items() if worker.process.poll() is not None]:
            twins = [each for each in self._strays if each[0] == index and each[2]]
            if self.running[index].process.poll() == 2 and twins:  # of two, either may be refused
                self._strays.remove(twins[0])
                self._strays.append((index, self.running[index], True))
                self.running[index] = twins[0][1]
            elif self.running[index].process.poll() or not self._is_ending:
                self.end_one(index, signal.SIGKILL)
        for index, stray, _ in list(self._strays):
            if (status := stray.process.poll()) is not None:
                if status not in (2, self._kind.status):
                    raise Lost(f"a wrong worker {index} left with {status}:\n{stray.output()}")
                self._look(stray)
                self._strays = [each for each in self._strays if each[1] is not stray]
                self.due |= {index: 0} if index in self.due else {}

    def _look(self, *workers):
        """Reads what these, which have ended, and all that run have said since the last look; Lost if it is untrue."""
        said = {}
        for worker in [*workers, *self.running.values()]:
            text = worker.output()
            said[worker] = text[self._read[worker] :]
            self._read[worker] = len(text)
            if "Starting again" in said[worker]:
                self._touch(*[index for index, each in self.running.items() if each is worker])
        for line in "\n".join(said.values()).splitlines():
            for pattern, mark in CLAIMS:
                for found in re.finditer(pattern, line):
                    if (mark, found[1]) not in self._done | self._done_before:
                        raise Lost(f"untrue: {line}\ndone: {self._done_before}, {self._done}")

    # The end.

    def end(self, index=0):
        """Ends it by SIGTERM to a worker; AssertionError if it differs from a run that nobody touched."""
        self.await_step()
        self.note("status", 143, -15)
        self.end_one(index, signal.SIGTERM)
        if index:
            self.end_one(0, 0)
        self._look()
        self.close()
        self._compare(jobs.saved_step(self.train_dir))

    def end_at_last_step(self):
        """Lets it come to its last step, disturbs it there, and goes on until all have left with 0, as does who gives
        the same command everywhere when one has not; AssertionError as `end`."""
        self.await_step()
        for index in list(self.running):
            self.end_one(index, signal.SIGKILL)
        last = self._options["max_steps"] = jobs.saved_step(self.train_dir) + 30
        self._is_ending, moment = True, last - self._draw.randrange(3)
        self.note("status", 0)
        self._await(lambda: jobs.logged_step(self.train_dir) >= moment, 0.001)
        time.sleep(self._draw.choice([0, 0.5, 2]) * self._draw.random())
        self._draw.choice([self._kill, self._stop, self._sigterm])()

        ended, since = [], 0.0

        def have_ended():
            nonlocal ended, since
            before, ended = ended, [index for index, each in self.running.items() if each.process.poll() is not None]
            since = since if ended == before else time.monotonic()
            # Who returns finds no chief, or it is the chief and says that it waits for those that have left with 0.
            if ended and (self.due if 0 in ended else time.monotonic() - since > 90):
                for index in ended:
                    self.end_one(index, signal.SIGKILL)
            return len(ended) == self._kind.workers and not self.due

        self._await(have_ended)
        self._look()
        self.close()
        assert jobs.saved_step(self.train_dir) == last
        self._compare(last)

    def _compare(self, steps):
        """AssertionError if examples, variables, log lines or a curve are not those of a run that nobody touched."""
        alone, is_exact = self._folder / "alone", self._kind.workers == 1
        log = {soak_workload.LOG: str(self._folder / "log of the undisturbed")}
        towers = dict(num_gpus=2) if is_exact else dict(num_gpus=1, accumulate_steps=self._kind.batches)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), mock.patch.dict(os.environ, log):
            jobs.train_toy(alone, **(OPTIONS | towers | dict(max_steps=steps)))
        batch = self._kind.batches * OPTIONS["batch_size"]
        trained, self.sizes = soak_workload.trained(self._log, batch, steps)
        assert trained == {step: list(range(batch * step, batch * (step + 1))) for step in range(steps)}
        found, expected = (
            jobs.variables(folder, steps)
            | {
                f"log line {i}": np.float64([each["step"], each["examples"], each["loss"]])
                for i, each in enumerate(jobs.metrics(folder))
                if each["step"] <= steps
            }
            | {
                f"point {i}": np.float64([event.step, event.value])
                for i, event in enumerate(jobs.events(folder).Scalars("total_loss"))
                if event.step <= steps
            }
            for folder in (self.train_dir, alone)
        )
        (jobs.assert_identical if is_exact else jobs.assert_close)(found, expected)


def scripted(folder, *kind, **options):
    """A Run of a kind with these options, whose workers are soon missed; to be disturbed by the caller."""
    kind = Kind(*kind, WORKERS | dict(worker_timeout_secs=2) | options)
    return contextlib.closing(Run(kind, random.Random(0), folder / "soak"))
