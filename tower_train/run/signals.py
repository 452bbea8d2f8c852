"""SIGINT, SIGTERM and SIGHUP end a run after the current step, a second SIGINT at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tower_train import errors
from tower_train.console import say

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: of a terminal that closes
_FREE_SECS = 0.5
_END = b"\0"  # no signal has this number


class Received:
    """The signals received so far.

    Args:
      leave_at_once: ends the process for a second SIGINT; None: the main thread gets a KeyboardInterrupt.
    """

    stopping: signal.Signals | None = None  # the first of them, or None
    free: Callable[[], None] = staticmethod(lambda: None)  # frees a step under way, in which Python calls no handlers
    _failure: BaseException | None = None
    _is_noting = _is_raising = False

    def __init__(self, leave_at_once: Callable[[errors.WorkerError], None] | None = None):
        self._leave_at_once = leave_at_once

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Only notes these signals within this block, except a second SIGINT, which counts at once, and those that are
        not Python's to handle: a SIGHUP that nohup ignores, and handlers of a program in C that Python is part of."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.getsignal(number) for number in STOPPING}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            before[signal.SIGHUP] = None
        before = {number: handler for number, handler in before.items() if handler is not None}  # as C's is
        for number in before:
            signal.signal(number, self._note)
        # for the second SIGINT inside a step, since Python calls signal handlers only between its own instructions
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=[reading], name="signals", daemon=True)
        watcher.start()
        self._is_noting = True
        try:
            yield
        except Exception:
            if self._failure:  # that of a step that was freed
                raise self._failure from None
            raise
        finally:
            self._is_noting = False
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.write(writing, _END)  # closing it is not enough: processes that were forked meanwhile have it too
            watcher.join()
            os.close(writing)
            os.close(reading)

    def raise_in_main(self, failure: BaseException) -> None:
        """Lets the main thread raise an exception, wherever it is in Python."""
        if self._failure:
            return
        self._failure = failure
        say(f"*** {failure}")  # the main thread may never come to raise it
        threading.Thread(target=self.free, daemon=True).start()  # it may wait for the step
        time.sleep(_FREE_SECS)  # TensorFlow takes no exception while it makes its own
        if self._is_noting:
            self._is_raising = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # ends a sleep too

    def _note(self, number: int, _frame) -> None:
        if self._is_raising:
            raise self._failure
        self.stopping = self.stopping or signal.Signals(number)

    def _watch(self, reading: int) -> None:
        interrupts = 0
        while _END not in (numbers := os.read(reading, 64)):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts < 2 or self._failure:
                continue
            why = "Left at once: what was trained since the last save will be trained again."
            if self._leave_at_once:
                self._leave_at_once(errors.WorkerError(why, 128 + signal.SIGINT))
            self.raise_in_main(KeyboardInterrupt(why))
