"""Event files: the curves that TensorBoard draws."""

import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

from tower_train.run_dir import attempts

v1 = tf.compat.v1

_MOST_WAITING = 1000  # events kept in memory while they cannot be written; the oldest go first


class EventWriter:
    """Writes event files, at once and by itself: TensorFlow's own writer has a thread that dies when a disk is full.

    Where an event cannot be written, the file is cut back to its last whole event, and the event goes, with those that
    follow, into a new file as soon as that can be written.
    """

    def __init__(self, folder: pathlib.Path, warn: Callable[[str], None] = print):
        self._folder, self._waiting = folder, []
        self._path = self._file = None
        self._attempts = attempts.Attempts(f"{folder}/events.out.*", "Curves wait in memory until they can.", warn)

    def add_summary(self, summary: v1.Summary | bytes, step: int) -> None:
        """Writes a Summary, or a serialized one."""
        if isinstance(summary, bytes):
            summary = v1.Summary.FromString(summary)
        self._add(v1.Event(wall_time=time.time(), step=step, summary=summary))

    def add_session_log(self, session_log: v1.SessionLog, step: int) -> None:
        """Writes a SessionLog."""
        self._add(v1.Event(wall_time=time.time(), step=step, session_log=session_log))

    def _add(self, event: v1.Event) -> None:
        self._waiting = [*self._waiting[1 - _MOST_WAITING :], event]
        self.flush()

    def flush(self) -> None:
        """Tries to write what could not be written before."""
        if not self._waiting:
            return
        try:
            if not (self._file and os.path.exists(self._path)):
                self._open()
            for event in self._waiting:
                self._file.write(event.SerializeToString())
            self._file.flush()
            self._whole_bytes = os.path.getsize(self._path)
        except (OSError, tf.errors.OpError) as error:
            self._give_up()
            self._attempts.failed(error)
        else:
            self._waiting = []
            self._attempts.succeeded()

    def _open(self) -> None:
        """Opens a file whose name no other has and whose place among the others, by name, is by time."""
        self._close()
        os.makedirs(self._folder, exist_ok=True)
        seconds, nanos = divmod(time.time_ns(), 10**9)
        self._path = self._folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{nanos:09d}"
        self._whole_bytes = 0
        self._file = tf.io.TFRecordWriter(str(self._path))
        self._file.write(v1.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def _give_up(self) -> None:
        """Closes the file and leaves its whole events."""
        self._close()
        try:
            if self._path and self._whole_bytes:
                os.truncate(self._path, self._whole_bytes)
            elif self._path:
                os.remove(self._path)
        except OSError:
            pass  # as for writing to it
        self._path = None

    def _close(self) -> None:
        file, self._file = self._file, None
        try:
            if file:
                file.close()
        except (OSError, tf.errors.OpError):
            pass  # what it held is still waiting here

    def close(self) -> None:
        """Writes what waits, if that can be, and closes the file."""
        self.flush()
        self._close()


def open_writer(folder: pathlib.Path, warn: Callable[[str], None] = print) -> EventWriter:
    """A writer of a new event file in a folder; both are made with the first event. warn: prints a line."""
    return EventWriter(folder, warn)


def add_scalars(writer: EventWriter, values: Mapping[str, float], step: int) -> None:
    """One point of each curve, by tag."""
    points = [v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    writer.add_summary(v1.Summary(value=points), step)
