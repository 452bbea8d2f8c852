"""The CIFAR-10 binary format, read whole, checked byte by byte, and given to the trainer as `Examples`.

A file is a sequence of 3073-byte records: one label byte, then 32x32 red, 32x32 green and 32x32 blue bytes, row by row
(https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version"). A file may hold any number of records, so smaller data
sets in the same format work too.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence
from concurrent import futures

import numpy as np

from tower_train import errors, host
from tower_train.data import arrays
from tower_train.examples import Examples

IMAGE_SIZE = 32
CHANNELS = 3
NUM_CLASSES = 10
RECORD_BYTES = 1 + CHANNELS * IMAGE_SIZE * IMAGE_SIZE
FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
ALL_FILES = FILES["train"] + FILES["test"]
CLASS_NAMES_FILE = "batches.meta.txt"
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one or more files."""

    images: np.ndarray  # uint8 [n, 32, 32, 3]
    labels: np.ndarray  # int32 [n], 0 to 9
    fingerprint: str  # 16 hexadecimal digits of a SHA-256 over every byte of every file, in order


def read(paths: Sequence[str | os.PathLike]) -> Records:
    """Reads files in the CIFAR-10 binary format, one after the other. Raises DataError for a file that is missing,
    unreadable, empty or not a whole number of records, or a label that is not 0 to 9."""
    with futures.ThreadPoolExecutor(min(len(paths), host.cores())) as pool:  # which numpy and hashlib do not block
        images, labels, digests = zip(*pool.map(_read_file, paths), strict=True)
    fingerprint = hashlib.sha256(b"".join(digests)).hexdigest()[:16]
    return Records(np.concatenate(images), np.concatenate(labels), fingerprint)


def read_split(directory: str | os.PathLike, split: str) -> Records:
    """Reads the files of a split, 'train' or 'test', in `directory`. Raises DataError like `read`."""
    return read([os.path.join(directory, name) for name in FILES[split]])


def class_names(directory: str | os.PathLike) -> tuple[str, ...]:
    """Reads the names in `batches.meta.txt`; CIFAR-10's own if that file is missing."""
    path = pathlib.Path(directory, CLASS_NAMES_FILE)
    return tuple(filter(None, path.read_text(encoding="utf-8").splitlines())) if path.exists() else CLASS_NAMES


def examples(directory: str | os.PathLike, split: str, name: str) -> Examples:
    """Reads the examples of a split; logs use the name: uint8 [batch, 32, 32, 3] images and int32 labels."""
    records = read_split(directory, split)
    fetch = arrays.fetcher(records.images, records.labels)
    return Examples(
        name=f"{name} {split}",
        num_examples=len(records.labels),
        open=lambda: fetch,
        fingerprint=records.fingerprint,
        class_names=class_names(directory),
        labels=records.labels,
    )


def _read_file(path) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Returns the images and labels of one file, and the SHA-256 of its bytes."""
    try:
        stored = np.fromfile(path, np.uint8)
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
    if not len(stored) or len(stored) % RECORD_BYTES:
        raise errors.DataError(
            f"{path}: has {len(stored)} bytes; the CIFAR-10 binary format has {RECORD_BYTES} for each image. Replace "
            "the file with a whole copy."
        )
    records = stored.reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype(np.int32)
    if labels.max() >= NUM_CLASSES:
        raise errors.DataError(
            f"{path}: record {labels.argmax()} has label {labels.max()}; labels are 0 to {NUM_CLASSES - 1}. The file "
            "is damaged or not in the CIFAR-10 binary format."
        )
    images = np.empty([len(records), IMAGE_SIZE, IMAGE_SIZE, CHANNELS], np.uint8)
    for channel, plane in enumerate(np.split(records[:, 1:], CHANNELS, axis=1)):  # a third of a transposition's time
        images[..., channel] = plane.reshape(images.shape[:3])
    return images, labels, hashlib.sha256(stored).digest()
