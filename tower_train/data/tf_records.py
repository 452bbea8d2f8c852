"""TFRecord files as `Examples` fetched by index: every file is read once, to check it and to find its records.

A record is its length (8 bytes, little-endian), a checksum of that, the content, a checksum of that, 4 bytes each
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details"). TensorFlow compares both
checksums in that first reading. Later readings compare a CRC-32 of the content, which Python's zlib computes fast.
"""

import collections
import dataclasses
import functools
import glob
import hashlib
import inspect
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent import futures

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.examples import Examples, check_dense

_HEADER, _FOOTER = 12, 4  # bytes around a record's content
_BY_ITSELF = tf.compat.v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
_RECENT = 256  # batches, more than are read at the same time
_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78\x01": "ZLIB", b"\x78\x9c": "ZLIB", b"\x78\xda": "ZLIB"}


@dataclasses.dataclass(frozen=True)
class Index:
    """The places of the records of some files; arrays over records."""

    paths: tuple[str, ...]  # of the files, in sorted order
    files: np.ndarray  # int32, indices into the paths
    offsets: np.ndarray  # int64, bytes to the beginning of the content
    lengths: np.ndarray  # int64, bytes of the content
    checksums: np.ndarray  # uint32, CRC-32 of the content

    # indices of the batches read last
    recent: collections.deque = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_RECENT))

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Reads the contents of records: bytes objects [batch]; DataError if a file changed since it was indexed."""
        self.recent.append(indices)
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
            # Opened each time, for microseconds, since there may be more files than a process may have open.
            with open(path, "rb", buffering=0) as file:
                content = os.pread(file.fileno(), int(self.lengths[index]), offset)
        except OSError as error:
            raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
        if zlib.crc32(content) != self.checksums[index]:
            raise _damage(path, offset - _HEADER, "changed since training began")
        return content


def examples(
    name: str,
    patterns: str | os.PathLike | Sequence[str | os.PathLike],
    parse: Callable[[tf.Tensor], tuple],
    class_names: Sequence[str] = (),
    batched: bool = False,
) -> Examples:
    """Makes examples of the records of files. The trainer's permutation shuffles all of them at once, each epoch anew.

    Args:
      name: name of the data set in logs.
      patterns: one or more paths, or patterns such as 'data/train-*.tfrecord'.
      parse: string scalar, a record's content -> (features, label), as with tf.io.parse_single_example.
      class_names: names of labels 0, 1, ...; empty if labels are not classes.
      batched: parse takes [batch] records at once, as tf.io.parse_example does, which is faster.

    Raises:
      DataError: no such file, one that cannot be read or is compressed, no records, or one that is damaged or cut off.
    """
    paths = _matching(name, patterns)
    with futures.ThreadPoolExecutor(min(len(paths), host.cores())) as pool:
        scanned = list(pool.map(_scan, paths))
    of_file = np.repeat(np.arange(len(paths), dtype=np.int32), [len(offsets) for offsets, *_ in scanned])
    index = Index(tuple(paths), of_file, *map(np.concatenate, zip(*scanned, strict=True)))

    def open_records():
        def fetch(indices: tf.Tensor):
            records = tf.numpy_function(index.read, [indices], tf.string, stateful=False)
            records.set_shape(indices.shape)
            if batched:
                return parse(records)
            with tf.Graph().as_default():
                parsed = parse(tf.compat.v1.placeholder(tf.string, []))
            check_dense(name, parsed)
            kinds = tf.nest.map_structure(tf.TensorSpec.from_tensor, parsed)
            return tf.map_fn(parse, records, fn_output_signature=kinds)

        return fetch

    if not len(index.files):
        raise errors.DataError(f"{name}: {', '.join(index.paths)} hold no records.")
    return Examples(
        name,
        len(index.files),
        open_records,
        index.fingerprint(),
        tuple(class_names),
        parallel_steps=None if batched else host.cores(),
        fault=functools.partial(_fault, index, parse, batched),
    )


def _fault(index: Index, parse: Callable, batched: bool) -> str | None:
    """Returns which of the records read last cannot be parsed, or has another shape than the first one; or None."""
    with tf.Graph().as_default(), tf.compat.v1.Session(config=_BY_ITSELF) as session:
        content = tf.compat.v1.placeholder(tf.string, [1] if batched else [])
        parsed = tf.nest.flatten(parse(content))
        first = None
        for i in np.unique(np.concatenate([[0], *index.recent])):
            place = f"{index.paths[index.files[i]]}: the record at byte offset {index.offsets[i] - _HEADER}"
            try:
                record = index.read(np.array([i]))
                found = session.run(parsed, {content: record if batched else record[0]})
            except tf.errors.OpError as error:
                return f"{place} cannot be parsed: {errors.reason(error)}"
            shapes = [each.shape for each in found]
            first = first or shapes
            if shapes != first:
                return f"{place} gives shapes {shapes}, others give {first}"
    return None


def _matching(name: str, patterns) -> list[str]:
    patterns = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    paths: set[str] = set()
    for pattern in map(os.fspath, patterns):
        files = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not files:
            raise errors.DataError(f"{name}: there is no file {pattern}.")
        paths.update(files)
    if not paths:
        raise errors.DataError(f"{name}: no files are named. Name at least one.")
    return sorted(paths)


def _scan(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns Index's offsets, lengths and checksums of the records of one file."""
    offsets, lengths, checksums, offset = [], [], [], 0
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            records = inspect.unwrap(tf.compat.v1.io.tf_record_iterator)(path)  # without its lines on deprecation
            while offset < size:
                length = int.from_bytes(os.pread(file.fileno(), 8, offset), "little")
                following = offset + _HEADER + length + _FOOTER
                # TensorFlow ends the process at a length that no memory can hold.
                if following > size or (content := next(records, None)) is None:
                    raise tf.errors.DataLossError(None, None, "")
                offsets.append(offset + _HEADER)
                lengths.append(length)
                checksums.append(zlib.crc32(content))
                offset = following
    except tf.errors.DataLossError:
        if not offset and (kind := _compression(path)):
            raise errors.DataError(
                f"{path}: is compressed ({kind}), so its records cannot be fetched by index. Decompress it, or give "
                f"tf.data.TFRecordDataset(paths, {kind!r}) to tower_train.data.tf_data."
            ) from None
        raise _damage(path, offset, "is damaged or cut off") from None
    except (tf.errors.OpError, OSError) as error:
        raise errors.DataError(f"{path}: cannot be read: {errors.reason(error)}.") from None
    return np.array(offsets, np.int64), np.array(lengths, np.int64), np.array(checksums, np.uint32)


def _damage(path: str, offset: int, what: str) -> errors.DataError:
    return errors.DataError(
        f"{path}: the record at byte offset {offset} {what}. Replace the file with a whole copy, or leave it out."
    )


def _compression(path: str) -> str | None:
    with open(path, "rb") as file:
        return _COMPRESSED.get(file.read(2))
