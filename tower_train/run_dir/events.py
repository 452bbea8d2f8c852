"""Event files: the curves that TensorBoard draws."""

import contextlib
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Mapping

import tensorflow as tf
from google.protobuf import struct_pb2

from tower_train.run_dir import metrics

v1 = tf.compat.v1

_MOST_WAITING = 1000
_PREFIX, _DIGITS = "events.out.tfevents.", 10
_NAME = re.compile(rf"{re.escape(_PREFIX)}\d{{{_DIGITS}}}\.", re.ASCII)


class EventWriter(metrics.RecordWriter):
    """Writes event files, at once and by itself: TensorFlow's own writer has a thread that dies when a disk is full.

    If an event cannot be written, the file is cut back to its last whole event, and the event goes, with those that
    follow, into a new file as soon as that can be written. The folder and the first file are made with the first event.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__(f"{folder}/events.out.*", _MOST_WAITING)
        self._folder = folder
        self._path = self._file = None

    def add(self, step: int, **content) -> None:
        """Writes an event of a step: summary=Summary, or another field of the Event protocol buffer."""
        self.append(v1.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Writes the events that wait, if that is possible, and closes the file."""
        self.flush()
        self._close()

    def _write(self, records) -> None:
        try:
            if not (self._file and os.path.exists(self._path)):
                self._open()
            for event in records:
                self._file.write(event.SerializeToString())
            self._file.flush()
            self._whole_bytes = os.path.getsize(self._path)
        except (OSError, tf.errors.OpError):
            self._give_up()
            raise

    def _open(self) -> None:
        """Opens a file whose name comes after that of every other: by names TensorBoard orders files, and so starts."""
        self._close()
        os.makedirs(self._folder, exist_ok=True)
        seconds, nanos = divmod(time.time_ns(), 10**9)
        # The clock may have been ahead when those were made.
        seconds = max([seconds, *(int(name[len(_PREFIX) :][:_DIGITS]) + 1 for name in self._others())])
        self._path = self._folder / f"{_PREFIX}{seconds:0{_DIGITS}d}.{socket.gethostname()}.{nanos:09d}"
        self._whole_bytes = 0
        self._file = tf.io.TFRecordWriter(str(self._path))
        self._file.write(v1.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def _others(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if _NAME.match(name)]

    def _give_up(self) -> None:
        """Closes the file and leaves its whole events."""
        self._close()
        with contextlib.suppress(OSError):  # the next file is another
            if self._path and self._whole_bytes:
                os.truncate(self._path, self._whole_bytes)
            elif self._path:
                os.remove(self._path)
        self._path = None

    def _close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError, tf.errors.OpError):  # its events still wait here
            if file:
                file.close()


def add_scalars(writer: EventWriter, values: Mapping[str, float], step: int) -> None:
    points = [v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    writer.add(step, summary=v1.Summary(value=points))


def add_options(writer: EventWriter, options: Mapping[str, bool | float | str], step: int) -> None:
    """Adds the options of a run, by name, for TensorBoard's HPARAMS page.

    Its plugin reads a message HParamsPluginData (tensorboard/plugins/hparams/plugin_data.proto), put together here
    because a training machine may lack TensorBoard: in field 3 a SessionStartInfo with the options in field 1, encoded
    as those of a Struct, and the time in field 5.
    """
    values = struct_pb2.Struct()  # whose texts are UTF-8, which a path need not be
    values.update({name: _utf8(value) if isinstance(value, str) else value for name, value in options.items()})
    info = values.SerializeToString() + b"\x29" + struct.pack("<d", time.time())
    plugin = v1.SummaryMetadata.PluginData(plugin_name="hparams", content=b"\x1a" + _length(info) + info)
    value = v1.Summary.Value(
        tag="_hparams_/session_start_info", metadata=v1.SummaryMetadata(plugin_data=plugin),
        tensor=tf.make_tensor_proto(0.0, tf.float32, [1]),
    )  # fmt: skip
    writer.add(step, summary=v1.Summary(value=[value]))


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _length(message: bytes) -> bytes:
    """Returns the length of a message as protocol buffers write it in front of it."""
    length, encoded = len(message), b""
    while length > 127:
        encoded += bytes([length & 127 | 128])
        length >>= 7
    return encoded + bytes([length])
