"""SIGINT and SIGTERM end a run after the step under way."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], signal.Signals | None]]:
    """Within this block SIGINT and SIGTERM are only noted.

    Yields:
      A function that returns the first of them that came, or None.
    """
    received = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # Python delivers signals to the main thread only
        return
    before = {number: signal.signal(number, lambda n, _: received.append(signal.Signals(n))) for number in STOPPING}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
