"""The watchdog: reports what a run waits for if no step ends for too long (--stall_timeout_secs)."""

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import progress
from tower_train.graph.devices import Devices

v1 = tf.compat.v1
_STALL_TIMEOUT_SECS = 1800.0  # the first step of some GPUs compiles for many minutes
_ASK_SECS = 5  # for an answer from the session, which may be stuck itself
_STEP = "a step"


def timeout_secs(config: Config, placed: Devices) -> float:
    """Returns --stall_timeout_secs, or its default: 0, for none, unless devices wait for each other."""
    if config.stall_timeout_secs is not None:
        return config.stall_timeout_secs
    is_between_gpus = config.variable_update == "mirrored" and len(placed.gpus) > 1
    return _STALL_TIMEOUT_SECS if placed.num_workers > 1 or is_between_gpus else 0.0


class Watchdog(v1.train.SessionRunHook):
    """Checks in a thread that steps end; use as a context manager, and as a hook.

    It reports each stall of more than timeout_secs (0: none) once, with the stacks of all Python threads, and its end.
    During a stalled step, and a stall between steps, it keeps calling note_stall with what is waited for and the
    seconds since the report, then with "" and 0 when it is over. `counts` is TrainingGraph.progress.
    """

    def __init__(
        self, timeout_secs: float, counts: Mapping[str, tf.Tensor], clock: Callable[[], float] = time.monotonic,
        note_stall: Callable[[str, float], None] = lambda what, seconds: None,
    ):  # fmt: skip
        self._timeout, self._counts, self._clock, self._note_stall = timeout_secs, counts, clock, note_stall
        self._doing, self._since = "the session to begin", clock()
        self._session, self._started = None, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self._timeout:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        if self._timeout:
            self._thread.join(_ASK_SECS)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Gives other work than a step, within this block, as much time as a step."""
        before = self._doing
        self._doing, self._since = what, self._clock()
        try:
            yield
        finally:
            self._doing, self._since = before, self._clock()

    def after_create_session(self, session, coord):
        self._session, self._started = session, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watches a step, done within this block."""
        self.before_run(None)
        yield
        self.after_run(None, None)

    def before_run(self, run_context):
        self._started += 1
        self._doing, self._since = _STEP, self._clock()

    def after_run(self, run_context, run_values):
        self._doing, self._since = progress.BETWEEN_STEPS, self._clock()

    def _watch(self) -> None:
        reported, ended = None, False
        while not ended:
            ended = self._ended.wait(min(1.0, self._timeout / 4))
            since, seconds = self._since, self._clock() - self._since
            if reported not in (None, since):
                say(f"*** Going on, after {since - reported:.0f} s.")
                reported = None
                self._note_stall("", 0.0)
            if seconds > self._timeout and not ended:
                is_step = self._doing == _STEP
                what = self._waited_for() if is_step else self._doing
                if reported is None:
                    reported = since
                    say(f"*** Nothing has ended for {seconds:.0f} s: waiting for {what}.\n{_stacks()}")
                if is_step or self._doing == progress.BETWEEN_STEPS:
                    self._note_stall(what, seconds - self._timeout)

    def _waited_for(self) -> str:
        """Looks into the session of the current step to find out what it lacks."""
        try:
            options = v1.RunOptions(timeout_in_ms=_ASK_SECS * 1000)
            counts = self._session.run(dict(self._counts), options=options)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            return f"a step whose session does not answer ({errors.reason(error)})"
        behind = [name for name, count in counts.items() if count < self._started]
        if progress.INPUT in behind:
            return progress.FOR_INPUT
        return ", ".join(behind) or progress.FOR_AVERAGING


def _stacks() -> str:
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()
    return "(no file for the stacks of the threads)"
