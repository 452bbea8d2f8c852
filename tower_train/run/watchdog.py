"""The watchdog: reports what a run waits for when nothing ends for too long (--stall_timeout_secs)."""

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import failures
from tower_train.console import say
from tower_train.graph.outputs import INPUT

v1 = tf.compat.v1
_LOOK_SECS = 1.0
_ASK_SECS = 5  # for an answer from the session, which may be stuck itself
_END_SECS = 10
_STDERR = 2  # also if Python has another one, as in a notebook
_STEP = "a step"


class StepWatchdog:
    """Watches, in a thread, the steps of a run and the work between them; a context manager.

    It reports each stall once, with the stacks of all Python threads, and its end.

    Args:
      timeout_secs: seconds without an end after which to report; 0: never.
      counts: TrainingGraph.progress.
      note_stall: called again and again in a stall with (what is waited for, seconds since the time-out), then ("", 0).
    """

    def __init__(self, timeout_secs: float, counts: Mapping[str, tf.Tensor], note_stall: Callable[[str, float], None]):
        self._timeout, self._counts, self._note_stall = timeout_secs, dict(counts), note_stall
        self.session = None  # to be set; it is asked for the progress of a step that does not end
        self._doing, self._since = "the session to begin", time.monotonic()
        self._started = 0  # steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self._timeout:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        if self._timeout:
            # with a limit, as it may itself wait for a session that is stuck
            self._thread.join(_END_SECS)

    def begin_step(self) -> None:
        """Watches a step, until `end_step`."""
        self._started += 1
        self._begin(_STEP)

    def end_step(self) -> None:
        self._begin(failures.BETWEEN_STEPS)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Gives other work than a step, within this block, as much time as a step."""
        before = self._doing
        self._begin(what)
        try:
            yield
        finally:
            self._begin(before)

    def _begin(self, what: str) -> None:
        self._doing, self._since = what, time.monotonic()

    def _watch(self) -> None:
        stalled_since, is_over = None, False
        while not is_over:  # the last look is after the end, to tell the others
            # short time-outs need more frequent looks
            is_over = self._ended.wait(min(_LOOK_SECS, self._timeout / 4))
            doing, since = self._doing, self._since
            seconds = time.monotonic() - since
            if stalled_since not in (None, since):
                say(f"*** Going on, after {since - stalled_since:.0f} s.")
                stalled_since = None
                self._note_stall("", 0.0)
            if is_over or seconds <= self._timeout:
                continue
            what = self._obstacle() if doing == _STEP else doing
            if stalled_since is None:
                stalled_since = since
                say(f"*** Nothing has ended for {seconds:.0f} s: waiting for {what}.")
                faulthandler.dump_traceback(_STDERR)
            if doing in (_STEP, failures.BETWEEN_STEPS):  # others wait for saves and evaluations anyway
                self._note_stall(what, seconds - self._timeout)

    def _obstacle(self) -> str:
        """Returns what the step under way waits for."""
        try:
            # else the watchdog would get stuck with the step
            options = v1.RunOptions(timeout_in_ms=_ASK_SECS * 1000)
            counts = self.session.run(self._counts, options=options)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            return f"a step whose session does not answer ({errors.reason(error)})"
        behind = [name for name, count in counts.items() if count < self._started]
        if INPUT in behind:
            return failures.FOR_INPUT
        return ", ".join(behind) or failures.FOR_AVERAGING
