"""Processes of the benchmark's sides: forked, without importing TensorFlow again, or fake ones that only answer."""

import contextlib
import os
import subprocess
import types

import forked
import pytest

from tower_train.bench import processes

WARMED_UP = """
import sys
from tower_train.bench import worker
worker.WARM_UP_SECS = 0.1
sys.exit(worker.main(sys.argv))
"""


class ForkedPopen(forked.Process):
    """`subprocess.Popen` of `python -m tower_train.bench.worker words...`, with a shorter warm-up."""

    def __init__(self, words, stderr, env, **_):
        (to_read, stdin), (stdout, to_write) = forked.pipe(), forked.pipe()
        super().__init__("-c", [WARMED_UP, *words[3:]], env, to_write, stderr.name, stdin=to_read)
        to_read.close(), to_write.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode, buffering=0) for end, mode in ((stdin, "wb"), (stdout, "rb"))
        )


@contextlib.contextmanager
def forking(is_forked=lambda words: True):
    """Lets the benchmark fork the processes of its sides within this block. is_forked: of a process's words, whether to
    fork it; others are started."""

    def start(words, **options):
        return (ForkedPopen if is_forked(words) else subprocess.Popen)(words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", types.SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        yield


class FakeWorkers:
    """Stands for the processes; writes down what happens to them."""

    def __init__(self, peak_bytes=1000, failing=None, steps_per_sec=lambda name, number: 20.0):
        """`failing` is the name of the side that dies when measured; steps_per_sec(side's name, how often measured)."""
        self.log, self.live, self.most_live = [], set(), 0
        self.peak_bytes, self.failing, self.steps_per_sec = peak_bytes, failing, steps_per_sec
        self.step_secs = None  # (number of the first, how many) -> seconds of each

    @contextlib.contextmanager
    def start(self, side):
        self.log.append(("start", side.name))
        self.live.add(side.name)
        self.most_live = max(self.most_live, len(self.live))
        try:
            yield FakeWorker(self, side)
        finally:
            self.live.remove(side.name)


class FakeWorker:
    def __init__(self, workers, side):
        self._workers, self._name, self._batch_size, self._measured = workers, side.name, side.batch_size, 0

    def wait_for(self, event):
        if event == "first_step":
            return {"event": event, "secs": 3.0, "import_secs": 2.0}
        content = {"work_per_step": self._batch_size, "peak_bytes": self._workers.peak_bytes,
                   "card_bytes": []}  # fmt: skip
        return {"event": event, "secs": 4.0} | content

    def measure(self, seconds, steps, each=False):
        if self._name == self._workers.failing:
            raise RuntimeError("died")
        self._workers.log.append(("measure", self._name))
        rate = self._workers.steps_per_sec(self._name, self._measured)
        self._measured += 1
        return {
            "event": "measured", "secs": 9.0, "steps": 10, "seconds": 10 / rate, "idle_secs": 1.0, "idle_cpu_secs": 0.0,
            "resident_bytes": 500 * 2**20,
        } | ({"first": 7, "step_secs": self._workers.step_secs(7, steps)} if each else {})  # fmt: skip

    def stop(self):
        return {"event": "stopped", "peak_bytes": self._workers.peak_bytes + 1, "card_bytes": []}
