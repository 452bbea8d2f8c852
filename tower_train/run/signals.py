"""SIGINT, SIGTERM and SIGHUP end a run after the current step, a second SIGINT at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: of a terminal that closes
_END = b"\0"  # no signal has this number


class Received:
    """The signals received so far."""

    stopping: signal.Signals | None = None  # the first of them, or None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Only notes these signals within this block, except a second SIGINT, and SIGHUP where nohup has it ignored.

        That one ends the process at once, also inside a step: a thread reads signal numbers as they come, since Python
        calls signal handlers only between its own instructions.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        before = {number: signal.signal(number, self._note) for number in STOPPING if number not in ignored}
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watcher = threading.Thread(target=_leave_at_second_interrupt, args=[reading], name="signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.write(writing, _END)  # closing it is not enough: processes that were forked meanwhile have it too
            watcher.join()
            os.close(writing)
            os.close(reading)

    def _note(self, number: int, _frame) -> None:
        self.stopping = self.stopping or signal.Signals(number)


def _leave_at_second_interrupt(reading: int) -> None:
    interrupts = 0
    while _END not in (numbers := os.read(reading, 64)):
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            os.write(2, b"\ntower_train: left at once; what was trained since the last save will be trained again\n")
            os._exit(128 + signal.SIGINT)
