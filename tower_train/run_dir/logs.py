"""The log of a run: metrics.jsonl, and event files, the curves that TensorBoard draws."""

import collections
import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import time
from collections.abc import Mapping

import tensorflow as tf

from tower_train import console, errors, files

v1 = tf.compat.v1

_MOST_WAITING = 1000
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.", re.ASCII)


def as_text(value: float) -> str:
    """Formats a metric for people: three decimals, or more if the value is small."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.1 else f"{value:.3g}"


class RecordWriter:
    """Writes records in order. Those that cannot be written wait in memory for the next time; of more than most_waiting
    the oldest are dropped. The first failure and the next success are reported."""

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
    """metrics.jsonl: one JSON object per log line, and whole lines only."""

    def __init__(self, path: pathlib.Path):
        super().__init__(str(path))
        self._path = path

    def append(self, record: dict) -> None:
        super().append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _write(self, records) -> None:
        text = b"".join(records)
        # opened each time, so that a deleted file or a full disk does no harm later
        with files.open_in_run(self._path, "ab") as file:
            size = file.tell()
            try:
                if file.write(text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise


class EventWriter(RecordWriter):
    """Writes event files, at once: TensorFlow's own writer has a thread that dies when a disk is full.

    If an event cannot be written, the file is cut back to its last whole event, and the rest goes into a new file as
    soon as that can be written. `name` is a folder below the run's.
    """

    def __init__(self, run: pathlib.Path, name: str = ""):
        super().__init__(f"{run / name}/events.out.*", _MOST_WAITING)
        self._run, self._folder, self._file = run, run / name, None

    def add(self, step: int, **content) -> None:
        """Writes an event of a step: summary=Summary, or another field of the Event protocol buffer."""
        self.append(v1.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Writes the events that wait, if that is possible, and closes the file."""
        self.flush()
        self._close()

    def _write(self, records):
        try:
            if not (self._file and self._path.exists()):
                self._open()
            for event in records:
                self._file.write(event.SerializeToString())
            self._file.flush()
            self._whole_bytes = os.path.getsize(self._path)
        except (OSError, tf.errors.OpError):
            if self._file:
                self._close()
                with contextlib.suppress(OSError):  # the next file is another
                    os.truncate(self._path, self._whole_bytes)
            raise

    def _open(self) -> None:
        """Opens a file whose name comes after all others', as TensorBoard orders files by name."""
        self._close()
        if self._folder != self._run:
            self._folder.mkdir(exist_ok=True)  # the run's own, if it was moved away, would be in the way of its return
        seconds, nanos = divmod(time.time_ns(), 10**9)
        others = filter(None, map(_EVENT_FILE.match, os.listdir(self._folder)))
        seconds = max([seconds, *(int(name[1]) + 1 for name in others)])  # the clock may have been ahead then
        self._path = self._folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{nanos:09d}"
        self._file, self._whole_bytes = tf.io.TFRecordWriter(str(self._path)), 0
        self._file.write(v1.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def _close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError, tf.errors.OpError):  # its events still wait here
            if file:
                file.close()


def add_scalars(writer: EventWriter, values: Mapping[str, float], step: int) -> None:
    points = [v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    writer.add(step, summary=v1.Summary(value=points))


def add_image(writer: EventWriter, tag: str, png: bytes) -> None:
    """Adds a PNG in RGB, at step 0."""
    width, height = (int.from_bytes(png[i : i + 4]) for i in (16, 20))  # the first chunk of every PNG
    image = v1.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    writer.add(0, summary=v1.Summary(value=[v1.Summary.Value(tag=tag, image=image)]))
