"""TFRecord files as `Examples` fetched by index: every file is read once, to check it and to find its records.

A record is its length (8 bytes, little-endian), a checksum of that, the content, a checksum of that, 4 bytes each
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details"). TensorFlow compares both
checksums in that first reading. Later readings compare a CRC-32 of the content, which Python's zlib computes fast.
"""

import contextlib
import dataclasses
import errno
import glob
import hashlib
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.examples import Examples

_HEADER, _FOOTER = 12, 4  # bytes around a record's content
_WRONG, _CUT_OFF = "is damaged: a checksum is wrong", "is cut off"
_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78\x01": "ZLIB", b"\x78\x9c": "ZLIB", b"\x78\xda": "ZLIB"}


class DamagedRecordError(errors.DataError):
    """A record that is not what was written.

    Attributes:
      path: of its file.
      offset: of its beginning, in bytes.
    """

    def __init__(self, path: str, offset: int, what: str):
        super().__init__(
            f"{path}: the record at byte offset {offset} {what}. Replace the file with a whole copy, or leave it out."
        )
        self.path, self.offset = path, offset


@dataclasses.dataclass(frozen=True)
class Index:
    """The places of the records of some files; arrays over records.

    Attributes:
      paths: of the files, in sorted order.
      files: int32, indices into the paths.
      offsets: int64, bytes to the beginning of the content.
      lengths: int64, bytes of the content.
      checksums: uint32, CRC-32 of the content.
    """

    paths: tuple[str, ...]
    files: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    checksums: np.ndarray

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the contents of records: bytes objects [batch]; DamagedRecordError if a file changed since it was
        indexed."""
        return np.array([self._read_one(int(index)) for index in indices], object)

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that change with the records or their order, not with the files' names."""
        digest = hashlib.sha256()
        for array in (self.files, self.lengths, self.checksums):
            digest.update(array)
        return digest.hexdigest()[:16]

    def _read_one(self, index: int) -> bytes:
        path, offset = self.paths[self.files[index]], int(self.offsets[index])
        try:
            # Opened each time, for 3 microseconds, since there may be more files than a process may have open.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = os.pread(file, int(self.lengths[index]), offset)
            finally:
                os.close(file)
        except OSError as error:
            raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
        if zlib.crc32(content) != self.checksums[index]:
            raise DamagedRecordError(path, offset - _HEADER, "changed since training began")
        return content


def examples(
    name: str,
    patterns: str | os.PathLike | Sequence[str | os.PathLike],
    parse: Callable[[tf.Tensor], tuple],
    class_names: Sequence[str] = (),
    batched: bool = False,
    parallel_steps: int | None = None,
) -> Examples:
    """Makes examples of the records of files. The trainer's permutation shuffles all of them at once, each epoch anew.

    Args:
      name: name of the data set in logs.
      patterns: one or more paths, or patterns such as 'data/train-*.tfrecord'.
      parse: string scalar, a record's content -> (features, label), as with tf.io.parse_single_example.
      class_names: names of labels 0, 1, ...; empty if labels are not classes.
      batched: parse takes [batch] records at once, as tf.io.parse_example does, which is faster.
      parallel_steps: steps whose records are parsed at the same time; None: as the cores can.

    Raises:
      DataError: no such file, one that cannot be read or is compressed, or no records.
      DamagedRecordError: a record is damaged or cut off.
    """
    index = _index_of(_matching(name, patterns))

    def open_records():
        def fetch(indices: tf.Tensor):
            records = tf.numpy_function(index.read, [indices], tf.string, stateful=False)
            records.set_shape(indices.shape)
            if batched:
                return parse(records)
            with tf.Graph().as_default():
                parsed = parse(tf.compat.v1.placeholder(tf.string, []))
            kinds = tf.nest.map_structure(tf.TensorSpec.from_tensor, parsed)
            return tf.map_fn(parse, records, fn_output_signature=kinds)

        return fetch

    if not len(index.files):
        raise errors.DataError(f"{name}: {', '.join(index.paths)} hold no records.")
    return Examples(
        name, len(index.files), open_records, index.fingerprint(), tuple(class_names),
        parallel_steps=parallel_steps or (None if batched else host.cores()),
    )  # fmt: skip


def _index_of(paths: Sequence[str]) -> Index:
    """Reads files whole, several at the same time, and finds their records."""
    with futures.ThreadPoolExecutor(min(len(paths), host.cores())) as pool, _no_warnings():
        found = list(pool.map(_scan, paths))
    lengths = [lengths for lengths, _ in found]
    offsets = [np.cumsum(part + _HEADER + _FOOTER) - part - _FOOTER for part in lengths]
    files = np.repeat(np.arange(len(paths), dtype=np.int32), [len(part) for part in lengths])
    return Index(
        tuple(paths), files, np.concatenate(offsets), np.concatenate(lengths), np.concatenate([c for _, c in found])
    )


def _matching(name: str, patterns) -> list[str]:
    patterns = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    paths: set[str] = set()
    for pattern in map(os.fspath, patterns):
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not found:
            raise errors.DataError(f"{name}: there is no file {pattern}.")
        paths.update(found)
    if not paths:
        raise errors.DataError(f"{name}: no files are named. Name at least one.")
    return sorted(paths)


def _scan(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64 lengths, uint32 checksums) of the records of one file."""
    lengths: list[int] = []
    checksums: list[int] = []
    try:
        lengths, fault = _layout(path)
        for content in itertools.islice(tf.compat.v1.io.tf_record_iterator(path), len(lengths)):
            checksums.append(zlib.crc32(content))
    except tf.errors.DataLossError:
        fault = _WRONG
    except (tf.errors.OpError, OSError) as error:
        reason = getattr(error, "message", None) or getattr(error, "strerror", None) or error
        raise errors.DataError(f"{path}: cannot be read: {reason}.") from None
    if fault:
        offset = sum(lengths[: len(checksums)]) + len(checksums) * (_HEADER + _FOOTER)
        if not offset and (kind := _compression(path)):
            raise errors.DataError(
                f"{path}: is compressed ({kind}), so its records cannot be fetched by index. Decompress it, or give "
                f"tf.data.TFRecordDataset(paths, {kind!r}) to tower_train.data.tf_data."
            )
        raise DamagedRecordError(path, offset, fault)
    return np.array(lengths, np.int64), np.array(checksums, np.uint32)


def _layout(path: str) -> tuple[list[int], str]:
    """Returns the lengths of a file's records, as far as it holds them, and the fault of the next one, or "".

    TensorFlow ends the process at a length that no memory can hold.
    """
    lengths, offset = [], 0
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file of bytes on a disk")
        while (left := status.st_size - offset) > 0:
            header = os.pread(file.fileno(), _HEADER, offset)
            if len(header) < _HEADER:
                return lengths, _CUT_OFF
            length, checksum = struct.unpack("<QI", header)
            if length > left - _HEADER - _FOOTER:
                return lengths, _CUT_OFF if checksum == _masked_crc32c(header[:8]) else _WRONG
            lengths.append(length)
            offset += _HEADER + length + _FOOTER
    return lengths, ""


def _masked_crc32c(data: bytes) -> int:
    """Returns the format's checksum (the same page), bit by bit, which suffices for a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Silences TensorFlow's three lines that deprecate its function to iterate over records outside of datasets."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _compression(path: str) -> str | None:
    with open(path, "rb") as file:
        return _COMPRESSED.get(file.read(2))
