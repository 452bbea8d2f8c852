"""SIGINT and SIGTERM end a run after the step under way, a second SIGINT at once; SIGUSR1 saves."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAVING = signal.SIGUSR1


class Received:
    """The signals that came.

    Attributes:
      stopping: the first SIGINT or SIGTERM, or None.
    """

    def __init__(self):
        self.stopping: signal.Signals | None = None
        self._saves = 0

    def note(self, number: int, _frame=None) -> None:
        """A signal handler."""
        if number == SAVING:
            self._saves += 1
        elif not self.stopping:
            self.stopping = signal.Signals(number)

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last time this was called."""
        asked, self._saves = self._saves > 0, 0
        return asked


@contextlib.contextmanager
def survived(number: int) -> Iterator[None]:
    """Within this block a signal that would end the process does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # blocked where the process has started itself again
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def noted(received: Received | None = None) -> Iterator[Received]:
    """Within this block SIGINT, SIGTERM and SIGUSR1 are only noted, in `received` if given, but for a second SIGINT.

    That one ends the process at once, also inside a step: Python calls signal handlers only between its own
    instructions, hence a thread that reads the numbers of signals as they come.
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
