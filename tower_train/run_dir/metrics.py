"""metrics.jsonl: one JSON object a log line, whole lines only, whatever happens to the disk."""

import errno
import json
import os
import pathlib
from collections.abc import Callable

from tower_train.run_dir import attempts


class MetricsFile:
    """Appends records. Those that cannot be written now are written with a later one.

    The file is opened for every record, so that one that was deleted or a disk that was full is no obstacle later.
    """

    def __init__(self, path: pathlib.Path, warn: Callable[[str], None] = print):
        """Args: the file; what prints a line."""
        self._path, self._waiting = path, b""
        self._attempts = attempts.Attempts(str(path), "Its lines wait in memory until it can.", warn)

    def append(self, record: dict) -> None:
        """Adds one line."""
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Tries to write what could not be written before."""
        if not self._waiting:
            return
        try:
            _append_whole(self._path, self._waiting)
        except OSError as error:
            self._attempts.failed(error)
        else:
            self._waiting = b""
            self._attempts.succeeded()


def _append_whole(path: pathlib.Path, text: bytes) -> None:
    """Appends all of the text, or raises OSError and leaves the file as it was."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        try:
            if os.write(file, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
