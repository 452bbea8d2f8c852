"""SIGINT and SIGTERM end a run after the current step, a second SIGINT at once; SIGUSR1 saves."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAVING = signal.SIGUSR1


class Received:
    """The signals received so far.

    Attributes:
      stopping: the first SIGINT or SIGTERM, or None.
    """

    def __init__(self):
        self.stopping: signal.Signals | None = None
        self._saves = 0

    def note(self, number: int, _frame=None) -> None:
        """Handles a signal."""
        if number == SAVING:
            self._saves += 1
        elif not self.stopping:
            self.stopping = signal.Signals(number)

    def take_save_request(self) -> bool:
        """Returns whether a save was requested since the last call."""
        asked, self._saves = self._saves > 0, 0
        return asked


@contextlib.contextmanager
def survived(number: int) -> Iterator[None]:
    """Ignores a signal that would end the process within this block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # blocked if the process has restarted itself
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def noted(received: Received | None = None) -> Iterator[Received]:
    """Only notes SIGINT, SIGTERM and SIGUSR1 within this block, in `received` if given, except a second SIGINT.

    That one ends the process at once, also inside a step: a thread reads signal numbers as they come, since Python
    calls signal handlers only between its own instructions.
    """
    received = received or Received()
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    before = {number: signal.signal(number, received.note) for number in (*STOPPING, SAVING)}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_leave_at_second_interrupt, args=[reading], name="signals", daemon=True)
    watcher.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)
        watcher.join()
        os.close(reading)


def _leave_at_second_interrupt(reading: int) -> None:
    interrupts = 0
    while numbers := os.read(reading, 64):
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            os.write(2, b"\ntower_train: left at once; what was trained since the last save will be trained again\n")
            os._exit(128 + signal.SIGINT)
