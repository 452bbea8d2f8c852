"""Records that a run appends to its files: metrics.jsonl, and the base of the event files' writer."""

import collections
import errno
import json
import os
import pathlib

import tensorflow as tf

from tower_train import console, errors
from tower_train.run_dir import files, schema


def as_text(value: float) -> str:
    """Formats a metric for people: three decimals, or more if the value is small."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.1 else f"{value:.3g}"


class RecordWriter:
    """Writes records in order. If they cannot be written now, they wait in memory for the next time.

    The first failure and the next success are reported on standard output. At most most_waiting records wait, of which
    the oldest are dropped first; None for all.
    """

    def __init__(self, name: str, most_waiting: int | None = None):
        self._name, self._failures = name, 0
        self._waiting = collections.deque(maxlen=most_waiting)

    def append(self, record) -> None:
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Tries to write the waiting records."""
        if not self._waiting:
            return
        try:
            self._write(self._waiting)
        except (OSError, tf.errors.OpError) as error:
            self._failures += 1
            if self._failures == 1:
                reason = errors.reason(error)
                console.say(f"*** {self._name} cannot be written ({reason}). Its records wait in memory until it can.")
            return
        self._waiting.clear()
        if self._failures:
            console.say(f"*** {self._name} can be written again, after {self._failures} failures.")
        self._failures = 0

    def _write(self, records) -> None:
        """Writes all of the records, or raises OSError or OpError and leaves none."""
        raise NotImplementedError


class MetricsFile(RecordWriter):
    """metrics.jsonl: one JSON object per log line, and whole lines only.

    The file is opened for each record, so that a deleted file or a full disk does no harm later.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(str(path))
        self._path = path

    def append(self, record: dict) -> None:
        """Adds one line; Mismatch for a record without a step or with values that are no numbers."""
        schema.METRICS.check(record)
        super().append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _write(self, records) -> None:
        text = b"".join(records)
        with files.open_regular(self._path, "a+b") as file:
            size = file.tell()
            try:
                if file.write(text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise
