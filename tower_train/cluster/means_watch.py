"""Watches, from a session of its own, the progress of a program's means over workers; for programs with their own
sessions."""

import contextlib
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tower_train.cluster.single_process import SingleProcess
from tower_train.graph import progress, worker_means

v1 = tf.compat.v1

_LOOK_SECS = 1.0
_ASK_SECS = 5  # for the server to answer
_END_SECS = 10


class MeansWatch:
    """A thread that tells the other workers the number of this one's means, and the time since the last.

    Args:
      membership: tells the others.
      stall_timeout_secs: seconds without a mean after which to report what is waited for; 0: never.
      clock: seconds since some moment.
    """

    def __init__(
        self, membership: SingleProcess, stall_timeout_secs: float, clock: Callable[[], float] = time.monotonic
    ):  # fmt: skip
        self._membership, self._stall_timeout, self._clock = membership, stall_timeout_secs, clock
        self._counts, self._since, self._is_told = (0, 0), clock(), False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="means", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join(_END_SECS)

    def note(self, arrived: int, averaged: int) -> None:
        """Notes how often gradients and their means were computed."""
        if (arrived, averaged) != self._counts:
            self._counts, self._since = (arrived, averaged), self._clock()
        secs, is_waiting = self._clock() - self._since, arrived > averaged
        self._membership.note_means(averaged, secs if is_waiting else 0.0)
        is_stalled = arrived > 0 and 0 < self._stall_timeout < secs
        if is_stalled:
            waited_for = progress.FOR_AVERAGING if is_waiting else progress.FOR_PROGRAM
            self._membership.note_stall(waited_for, secs - self._stall_timeout)
        elif self._is_told:
            self._membership.note_stall("", 0.0)
        self._is_told = is_stalled

    def _watch(self) -> None:
        config = v1.ConfigProto(operation_timeout_in_ms=_ASK_SECS * 1000)
        config.MergeFrom(self._membership.devices.session_config)
        with tf.Graph().as_default() as graph:
            counts = worker_means.counts()
        with v1.Session(self._membership.target, graph, config) as session:
            is_over = False
            while not is_over:  # the last look is after the end, to tell the others
                is_over = self._ended.wait(_LOOK_SECS)
                with contextlib.suppress(tf.errors.OpError):
                    arrived, averaged = map(int, session.run(counts))
                    if arrived:  # programs that average differently report that themselves
                        self.note(arrived, averaged)
