"""SIGINT, SIGTERM and SIGHUP end a run after the current step; a second SIGINT is a KeyboardInterrupt."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tower_train.console import say

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: of a terminal that closes
_FREE_SECS = 0.5


class Received:
    """The signals received so far."""

    stopping: signal.Signals | None = None  # the first of them, or None
    free: Callable[[], None] = staticmethod(lambda: None)  # frees a step under way, in which Python calls no handlers
    _failure: BaseException | None = None
    _is_noting = _is_raising = False
    _interrupts = 0  # number of SIGINTs

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Only notes these signals within this block, except a second SIGINT and those that are not Python's to handle:
        a SIGHUP that nohup ignores, and handlers of a program in C that Python is part of."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.getsignal(number) for number in STOPPING}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            before[signal.SIGHUP] = None
        before = {number: handler for number, handler in before.items() if handler is not None}  # as C's is
        for number in before:
            signal.signal(number, self._note)
        self._is_noting = True
        try:
            yield
        except Exception:
            if self._failure:  # that of a step that was freed
                raise self._failure from None
            raise
        finally:
            self._is_noting = False
            for number, handler in before.items():
                signal.signal(number, handler)

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
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt("Left at once: what was trained since the last save will be trained again.")
        self.stopping = self.stopping or signal.Signals(number)
