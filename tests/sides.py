"""Processes of the benchmark's sides: forked, without importing TensorFlow again."""

import contextlib
import functools
import importlib
import os
import subprocess
import types

import forked
import pytest

from tower_train.bench import measure

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
def forking():
    """Lets the benchmark fork the processes of its sides within this block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "subprocess", types.SimpleNamespace(Popen=ForkedPopen, PIPE=subprocess.PIPE))
        yield


def trained_by(side):
    module, _, function = side.train.partition(":")
    return functools.partial(getattr(importlib.import_module(module), function), **side.arguments)
