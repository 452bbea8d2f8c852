"""The watchdog: reports what a program waits for if nothing ends for too long (--stall_timeout_secs)."""

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.graph import progress

v1 = tf.compat.v1
_LOOK_SECS = 1.0
_ASK_SECS = 5  # for an answer from the session, which may be stuck itself
_END_SECS = 10
_STEP = "a step"


class Watchdog:
    """Looks, in a thread, how long ago something ended.

    Once that is more than timeout_secs (0: never), it keeps calling note_stall with what is waited for and the seconds
    since the time-out, then with "" and 0 when it is over.
    """

    def __init__(self, timeout_secs: float, note_stall: Callable[[str, float], None], clock: Callable[[], float]):
        self._timeout, self._note_stall, self._clock = timeout_secs, note_stall, clock
        self._since, self._stalled_since = clock(), None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join(_END_SECS)

    def _look(self) -> None:
        since, seconds = self._since, self._clock() - self._since
        if self._stalled_since not in (None, since):
            self._say_over(since - self._stalled_since)
            self._stalled_since = None
            self._note_stall("", 0.0)
        if 0 < self._timeout < seconds and not self._ended.is_set():
            what, is_for_others = self._waited_for()
            if self._stalled_since is None:
                self._stalled_since = since
                self._say_stalled(what, seconds)
            if is_for_others:
                self._note_stall(what, seconds - self._timeout)

    def _watch(self) -> None:
        is_over = False
        while not is_over:  # the last look is after the end, to tell the others
            is_over = self._ended.wait(min(_LOOK_SECS, self._timeout / 4 or _LOOK_SECS))
            self._look()

    def _waited_for(self) -> tuple[str, bool]:
        """Returns what is waited for, and whether that is for others to know."""
        raise NotImplementedError

    def _say_stalled(self, what: str, seconds: float) -> None:
        """Called once at the beginning of a stall."""

    def _say_over(self, seconds: float) -> None:
        """Called at its end."""


class StepWatchdog(Watchdog, v1.train.SessionRunHook):
    """Watches the steps of a run and what is done between them; use as a context manager, and as a hook.

    It says each stall once, with the stacks of all Python threads, and its end.

    Args:
      timeout_secs, note_stall: as of Watchdog.
      counts: TrainingGraph.progress.
      clock: seconds since some moment.
    """

    def __init__(
        self, timeout_secs: float, counts: Mapping[str, tf.Tensor],
        note_stall: Callable[[str, float], None] = lambda what, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        super().__init__(timeout_secs, note_stall, clock)
        self._counts, self._doing = counts, "the session to begin"
        self._session, self._started = None, 0

    def __enter__(self):
        if self._timeout:
            self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watches a step, done within this block."""
        self.before_run()
        yield
        self.after_run()

    def after_create_session(self, session, coord=None):
        self._session, self._started = session, 0

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Gives other work than a step, within this block, as much time as a step."""
        before = self._doing
        self._doing, self._since = what, self._clock()
        try:
            yield
        finally:
            self._doing, self._since = before, self._clock()

    def before_run(self, run_context=None):
        self._started += 1
        self._doing, self._since = _STEP, self._clock()

    def after_run(self, run_context=None, run_values=None):
        self._doing, self._since = progress.BETWEEN_STEPS, self._clock()

    def _waited_for(self):
        if self._doing != _STEP:
            return self._doing, self._doing == progress.BETWEEN_STEPS
        try:
            options = v1.RunOptions(timeout_in_ms=_ASK_SECS * 1000)
            counts = self._session.run(dict(self._counts), options=options)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            return f"a step whose session does not answer ({errors.reason(error)})", True
        behind = [name for name, count in counts.items() if count < self._started]
        if progress.INPUT in behind:
            return progress.FOR_INPUT, True
        return ", ".join(behind) or progress.FOR_AVERAGING, True

    def _say_stalled(self, what, seconds):
        say(f"*** Nothing has ended for {seconds:.0f} s: waiting for {what}.\n{_stacks()}")

    def _say_over(self, seconds):
        say(f"*** Going on, after {seconds:.0f} s.")


class MeansWatchdog(Watchdog):
    """Watches the means over workers of a program with sessions of its own, and tells the others their number.

    Args:
      membership: of this worker; tells the others.
      stall_timeout_secs: seconds without a mean after which to report what is waited for; 0: never.
      counts: how often gradients and their means were computed, as they change; for `start`.
      clock: seconds since some moment.
    """

    def __init__(
        self, membership, stall_timeout_secs: float, counts: Sequence[int] = (0, 0),
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        super().__init__(stall_timeout_secs, membership.note_stall, clock)
        self._counts = counts
        self._membership, self._arrived, self._averaged = membership, 0, 0

    def note(self, arrived: int, averaged: int) -> None:
        """Notes how often gradients and their means were computed, and looks how long ago that last changed."""
        if (arrived, averaged) != (self._arrived, self._averaged) or not arrived:
            self._arrived, self._averaged, self._since = arrived, averaged, self._clock()
        waiting_secs = self._clock() - self._since if arrived > averaged else 0.0
        self._membership.note_means(averaged, waiting_secs)
        self._look()

    def _waited_for(self):
        return progress.FOR_AVERAGING if self._arrived > self._averaged else progress.FOR_PROGRAM, True

    def _watch(self):
        is_over = False
        while not is_over:  # the last look is after the end, to tell the others
            is_over = self._ended.wait(_LOOK_SECS)
            if self._counts[0]:  # programs that average differently report that themselves
                self.note(*self._counts)


def _stacks() -> str:
    """Returns the stacks of all Python threads as text."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()
    return "(no file for the stacks of the threads)"
