"""Checks the index of a checkpoint before TensorFlow reads it, as impossible sizes and types would end the process.

An index is a table as LevelDB has (doc/table_format.md there), uncompressed: blocks of keys and values, an index of
the blocks, and a footer. Its values are of tensorflow/core/protobuf/tensor_bundle.proto.
"""

import math
import os
from collections.abc import Iterator

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf.tensor_bundle_pb2 import BundleEntryProto

from tower_train import files

_FOOTER_BYTES = 48
_MOST_DIMENSIONS = 254  # of TensorFlow's TensorShape


def check(path: str | os.PathLike) -> None:
    """Raises ValueError for a file that is no index, or whose tensors cannot be."""
    try:
        for name, value in _entries(files.read_in_run(path)):
            if name:  # else it is the header
                _check_entry(name.decode(errors="replace"), BundleEntryProto.FromString(value))
    except (IndexError, TypeError, DecodeError) as error:
        raise ValueError(f"its index is damaged ({error})") from None


def _check_entry(name: str, entry: BundleEntryProto) -> None:
    dtype, sizes = tf.as_dtype(entry.dtype), [each.size for each in entry.shape.dim]
    count = math.prod(sizes)
    is_numeric = dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    num_bytes = count * dtype.size if is_numeric else entry.size
    if not (is_numeric or dtype == tf.string) or dtype != dtype.base_dtype:
        raise ValueError(f"{name} is of type {dtype.name}")
    if min(sizes, default=0) < 0 or len(sizes) > _MOST_DIMENSIONS or entry.shape.unknown_rank:
        raise ValueError(f"{name} has a shape of no tensor")
    for part in entry.slices:
        extents = [(each.start, each.start + each.length) for each in part.extent]
        are_within = [
            0 <= start < end <= size or start == end == 0 for (start, end), size in zip(extents, sizes, strict=False)
        ]
        if len(extents) != len(sizes) or not all(are_within):
            raise ValueError(f"{name} has a part outside of it")
    if not entry.slices and (num_bytes != entry.size or count > max(entry.size, 1)):
        raise ValueError(f"{name} has {count} values in {entry.size} bytes")


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table."""
    footer, end = content[-_FOOTER_BYTES:], 0
    _, _, at = _handle(footer, 0)
    for _, value in _block(content, *_handle(footer, at)[:2]):
        offset, size, _ = _handle(value, 0)
        if offset < end:
            raise ValueError("its blocks overlap")  # so that a small file is not read for ever
        end = offset + size
        yield from _block(content, offset, size)


def _block(content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block, whose end is a list of places and its length."""
    block = content[offset : offset + size]
    end = size - 4 * (1 + int.from_bytes(block[-4:], "little"))
    at, key = 0, b""
    while at < end:
        shared, at = _number(block, at)
        others, at = _number(block, at)
        length, at = _number(block, at)
        key = key[:shared] + block[at : at + others]
        at += others + length
        yield key, block[at - length : at]


def _handle(content: bytes, at: int) -> tuple[int, int, int]:
    """Reads the place of a block; returns its offset, its size, and where the next begins."""
    offset, at = _number(content, at)
    size, at = _number(content, at)
    return offset, size, at


def _number(content: bytes, at: int) -> tuple[int, int]:
    """Reads a number of seven bits a byte; returns it, and where the next begins."""
    number = shift = 0
    while True:
        byte, at = content[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
