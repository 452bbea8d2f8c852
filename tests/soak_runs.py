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
import jobs
import numpy as np
import small_disk
import soak_workload
import tensorflow as tf

TIMEOUT_SECS = 5  # of workers; a busy machine may take seconds for a heartbeat
PATIENCE_SECS = 180  # for a step, once nothing more happens; a busy machine may take a minute to start workers
OPTIONS = clusters.NORM | dict(
    workload="soak_workload", save_every_steps=10, keep_checkpoints=4, eval_every_steps=40, summary_every_steps=10
)
WORKERS = dict(worker_timeout_secs=TIMEOUT_SECS, start_timeout_secs=60, stall_timeout_secs=60)


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
    "kill": tuple(KINDS), "stop": tuple(KINDS), "SIGTERM": tuple(KINDS), "SIGINT": ("alone",),
    "damaged checkpoint": ("alone",), "full disk": ("alone",), "stray": CLUSTERS, "wrong returner": CLUSTERS,
    "garbage on the board": CLUSTERS, "cut connections": CLUSTERS,
}  # fmt: skip
NAMED = r"worker (\d+) \([^)]*\)(?:: worker \1 \([^)]*\))? "
# (pattern of a line with a worker's index, what must have been done to that one)
CLAIMS = (
    (NAMED + r"(?:is missing|is lost|has not started|has ended|was told to end)", "touched"),
    (NAMED + r"(?:cannot train|trains already|cannot be started)", "wrong"),
    (r"(\*\*\* Ignored) on the status board", "garbage"),
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
    """

    def __init__(self, kind, draw, folder, disk=None):
        folder.mkdir()
        self._kind, self._draw, self._folder, self._disk = kind, draw, folder, disk
        self.train_dir, self._log = (disk or folder) / "run", folder / "log"
        self._options = OPTIONS | kind.options | dict(train_dir=self.train_dir, max_steps=jobs.ENDLESS)
        self.hosts, self._stack = clusters.hosts(kind.workers), contextlib.ExitStack()
        self.running, self.due, self._strays = {}, dict.fromkeys(range(kind.workers), 0), []
        self._done, self._done_before = set(), set()
        self._read = collections.Counter()  # characters of each process's output
        self.close = self._stack.close
        self.sizes = []  # in the end: numbers of workers of the starts that did a step

    def disturb(self, what):
        """Does it at some moment, and waits until all train again, except one time in four; Lost if they do not."""
        if what == "full disk" and not self._disk:
            return
        time.sleep(self._draw.choice([0, 0.3, 2]) * self._draw.random())
        getattr(self, f"_{what.lower().replace(' ', '_')}")()
        if self._draw.random() < 0.75:
            self.await_step()

    def await_step(self):
        """Returns when all are there, strangers have gone, and a step is logged after now."""
        deadline, sizes = time.monotonic() + PATIENCE_SECS, []
        while self.due or self._strays or len(sizes) < 2 or sizes[-1] <= sizes[-2]:
            self._tend()
            if not self.due and not self._strays:  # a start may cut records off
                path = self.train_dir / "metrics.jsonl"
                sizes.append(path.stat().st_size if path.exists() else 0)
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {index}:\n{each.output()}" for index, each in self.running.items())
                raise Lost(f"no step in {PATIENCE_SECS} s:\n{said}")
            time.sleep(0.02)
        self._look()
        garbage = {each for each in self._done if each[0] == "garbage"}  # stays until the row is written anew
        self._done, self._done_before = garbage, self._done

    # The disturbances.

    def _kill(self, number=signal.SIGKILL):
        for index in self._some():
            self.end_one(index, number)

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
        """A wrongly started worker comes to a place that is taken, and touches nobody: the same command, or others."""
        self.await_step()
        hosts = [*self.hosts[:-1], *clusters.hosts(1)]
        changes = self._draw.choice([{}, dict(worker_hosts=",".join(hosts), learning_rate=0.5)])
        self.come(self._kind.workers - 1, **changes)

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

    def _garbage_on_the_board(self):
        self.note("garbage", "*** Ignored")
        text = self._draw.choice([b"no status", b"", b"{}", b"[" * 9999, self._draw.randbytes(99)])
        with contextlib.suppress(tf.errors.OpError):  # there may be no chief
            clusters.write_on_board(self.hosts[0], text, [self._draw.randrange(self._kind.workers)])

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

    def _trainer(self, index, **changes):
        variables = {
            soak_workload.LOG: str(self._log), soak_workload.CUT: str(self._folder / f"cut{index}"),
            soak_workload.PAUSE_SECS: str(self._draw.choice((0.02, 0.1))),
        }  # fmt: skip
        task = dict(worker_hosts=",".join(self.hosts), task_index=index) if self._kind.workers > 1 else {}
        return self._stack.enter_context(
            jobs.Program("tower_train", *jobs.flags(**(self._options | task | changes)), **variables)
        )

    def come(self, index, **changes):
        """Starts a wrong worker, which is refused; returns it."""
        self.note("wrong", str(index))
        self._strays.append((index, self._trainer(index, **changes)))
        return self._strays[-1][1]

    def end_one(self, index, number, returns=True):
        """Sends a worker a signal and waits for its end; it is due to return after a while, or not at all."""
        self._touch(index)
        worker = self.running.pop(index)
        worker.process.send_signal(number)
        status = worker.process.wait(PATIENCE_SECS)
        if status != -signal.SIGKILL and ("status", status) not in self._done | self._done_before:
            raise Lost(f"worker {index} left with {status}:\n{worker.output()}")
        self._look(worker)
        if returns:
            wait = 2 * TIMEOUT_SECS * self._draw.choice([0, 0, self._kind.workers > 1]) * self._draw.random()
            self.due[index] = time.monotonic() + wait

    def _tend(self):
        """Starts who is to start, and starts again who has left as it may; Lost if anyone left in another way."""
        for index in [index for index, when in self.due.items() if time.monotonic() > when]:
            del self.due[index]
            self.running[index] = self._trainer(index)
        for index in [index for index, worker in self.running.items() if worker.process.poll() is not None]:
            self.end_one(index, signal.SIGKILL)
        for index, stray in list(self._strays):
            if (status := stray.process.poll()) is not None:
                if status not in (2, self._kind.status):
                    raise Lost(f"a wrong worker {index} left with {status}:\n{stray.output()}")
                self._look(stray)
                self._strays.remove((index, stray))
                self.due |= {index: 0} if index in self.due else {}

    def _look(self, *workers):
        """Reads what processes have said since the last look; Lost if it is not true."""
        said = {}
        for worker in workers or [*self.running.values()]:
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
            | {f"log line {i}": np.float64([each["step"], each["examples"], each["loss"]])
               for i, each in enumerate(jobs.metrics(folder)) if each["step"] <= steps}
            | {f"point {i}": np.float64([event.step, event.value])
               for i, event in enumerate(jobs.events(folder).Scalars("total_loss")) if event.step <= steps}
            for folder in (self.train_dir, alone)
        )  # fmt: skip
        (jobs.assert_identical if is_exact else jobs.assert_close)(found, expected)


def scripted(folder, *kind, **options):
    """A Run of a kind with these options, whose workers are soon missed; to be disturbed by the caller."""
    kind = Kind(*kind, WORKERS | dict(worker_timeout_secs=2) | options)
    return contextlib.closing(Run(kind, random.Random(0), folder / "soak"))
