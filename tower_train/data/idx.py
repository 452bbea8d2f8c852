"""The idx format of MNIST and Fashion-MNIST, plain or gzipped.

A file is two zero bytes, a byte for the type of the values, a byte for the number of dimensions, each dimension as a
big-endian 32-bit number, and the values row by row (http://yann.lecun.com/exdb/mnist/, "The IDX file format").
"""

import gzip
import hashlib
import os
import struct
import zlib

import numpy as np

from tower_train import errors
from tower_train.data import arrays
from tower_train.examples import Examples

_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read(path: str | os.PathLike) -> np.ndarray:
    """Reads one file; gzip is recognised by its content, not by its name.

    Returns:
      An array of the file's type and shape, in this machine's byte order.

    Raises:
      DataError: the file is missing, unreadable, damaged, or not as long as its header says.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise errors.DataError(f"{path}: is damaged: {error}. Replace the file with a whole copy.") from None
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
    start = content[:4]
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _DTYPES or not start[3]:
        raise errors.DataError(
            f"{path}: begins with {start.hex(' ') or 'nothing'}; an idx file begins with 00 00, a type (08 for "
            "bytes) and the number of dimensions. It is empty, damaged or of another format."
        )
    dtype, rank = np.dtype(_DTYPES[start[2]]), start[3]
    try:
        shape = struct.unpack_from(f">{rank}I", content, 4)
        return np.frombuffer(content, dtype, offset=4 + 4 * rank).reshape(shape).astype(dtype.newbyteorder("="))
    except (struct.error, ValueError):
        raise errors.DataError(
            f"{path}: holds {len(content)} bytes, more or fewer than its header says. Replace it with a whole copy."
        ) from None


def examples(name: str, images: str | os.PathLike, labels: str | os.PathLike, class_names: tuple[str, ...]) -> Examples:
    """Reads the examples of a file of images, uint8 [n, height, width], and a file of labels, uint8 [n], such as
    MNIST's: uint8 [batch, height, width, 1] images and int32 [batch] labels, which number the class_names.

    Raises:
      DataError: as `read`, or files of another kind, of different lengths, or with a label out of range.
    """
    pixels, classes = read(images), read(labels)
    for path, array, dimensions in ((images, pixels, 3), (labels, classes, 1)):
        if array.dtype != np.uint8 or array.ndim != dimensions or not array.size:
            raise errors.DataError(
                f"{path}: holds {array.dtype} values of shape {array.shape}; expected uint8 values of {dimensions} "
                f"dimension{'s' * (dimensions > 1)}, at least one. Is it the right file?"
            )
    if len(pixels) != len(classes):
        raise errors.DataError(
            f"{images} holds {len(pixels)} images and {labels} {len(classes)} labels; they do not belong together."
        )
    if classes.max() >= len(class_names):
        at = int(np.argmax(classes >= len(class_names)))
        raise errors.DataError(
            f"{labels}: label {at} is {classes[at]}; labels are 0 to {len(class_names) - 1}. The file is damaged, or "
            "belongs to another data set."
        )
    digest = hashlib.sha256(f"{pixels.shape}".encode())
    digest.update(pixels)
    digest.update(classes)
    fetch = arrays.fetcher(pixels[..., np.newaxis], classes.astype(np.int32))
    return Examples(name, len(classes), lambda: fetch, digest.hexdigest()[:16], tuple(class_names), labels=classes)
