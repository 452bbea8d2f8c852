"""The CIFAR-10 binary format, read whole, checked byte by byte, and given to the trainer as `Examples`.

A file is a sequence of 3073-byte records: one label byte, then 32x32 red, 32x32 green and 32x32 blue bytes, row by row
(https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version"). A file may hold any number of records, so smaller data
sets in the same format work too.

The planes are interleaved to [height, width, channels] once, while a file is read: for 50,000 images that takes a tenth
of a second, as much as transposing the batches of a few hundred steps. Each thread reads, hashes and interleaves one
file at a time (numpy and hashlib release the interpreter lock).
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence
from concurrent import futures

import numpy as np

from tower_train import errors, files, host
from tower_train.data import arrays
from tower_train.examples import Examples

IMAGE_SIZE = 32
CHANNELS = 3
NUM_CLASSES = 10
RECORD_BYTES = 1 + CHANNELS * IMAGE_SIZE * IMAGE_SIZE
FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
ALL_FILES = FILES["train"] + FILES["test"]
CLASS_NAMES_FILE = "batches.meta.txt"
_PIECE_RECORDS = 1000  # so that only the images stay in memory
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
    counts = [_count_records(path) for path in paths]
    ends = np.cumsum(counts)
    try:
        files.check_room(RECORD_BYTES * int(ends[-1]))
    except OSError as error:
        raise errors.DataError(f"{', '.join(map(str, paths))}: {error.strerror}. Use fewer or smaller files.") from None
    images = np.empty([ends[-1], IMAGE_SIZE, IMAGE_SIZE, CHANNELS], np.uint8)
    labels = np.empty(ends[-1], np.int32)
    slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    with futures.ThreadPoolExecutor(min(len(slices), host.cores())) as pool:
        digests = pool.map(_read_file, paths, [images[s] for s in slices], [labels[s] for s in slices])
        fingerprint = hashlib.sha256(b"".join(digests)).hexdigest()[:16]
    return Records(images, labels, fingerprint)


def read_split(directory: str | os.PathLike, split: str) -> Records:
    """Reads the files of a split, 'train' or 'test', in `directory`. Raises DataError like `read`."""
    return read([os.path.join(directory, name) for name in FILES[split]])


def class_names(directory: str | os.PathLike) -> tuple[str, ...]:
    """Reads the ten names in `batches.meta.txt`; CIFAR-10's own if that file is missing or does not hold ten names."""
    try:
        lines = pathlib.Path(directory, CLASS_NAMES_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return CLASS_NAMES
    names = tuple(line.strip() for line in lines if line.strip())
    sane = len(names) == len(set(names)) == NUM_CLASSES and all(name.isprintable() for name in names)
    return names if sane else CLASS_NAMES


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


def _count_records(path) -> int:
    try:
        with files.open_regular(path) as file:
            count, rest = divmod(os.fstat(file.fileno()).st_size, RECORD_BYTES)
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
    if rest:
        raise errors.DataError(
            f"{path}: record {count} at byte offset {count * RECORD_BYTES} is cut off after {rest} bytes; every record "
            f"of the CIFAR-10 binary format has {RECORD_BYTES}. Replace the file with a whole copy."
        )
    if not count:
        raise errors.DataError(f"{path}: is empty; expected at least one record of {RECORD_BYTES} bytes.")
    return count


def _read_file(path, images: np.ndarray, labels: np.ndarray) -> bytes:
    """Fills images [n, 32, 32, 3] and labels [n] from the n records of one file; returns the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    piece = np.empty((_PIECE_RECORDS, RECORD_BYTES), np.uint8)
    try:
        with open(path, "rb") as file:
            for start in range(0, len(labels), _PIECE_RECORDS):
                records = piece[: len(labels) - start]
                if file.readinto(records) != records.nbytes:
                    raise errors.DataError(f"{path}: became shorter while it was read. Try again.")
                digest.update(records)
                labels[start : start + len(records)] = records[:, 0]
                planes = records[:, 1:].reshape(-1, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
                for channel in range(CHANNELS):  # a transposition would take three times as long
                    images[start : start + len(records), ..., channel] = planes[:, channel]
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None
    if labels.max() >= NUM_CLASSES:
        wrong = int(np.argmax(labels >= NUM_CLASSES))
        raise errors.DataError(
            f"{path}: record {wrong} at byte offset {wrong * RECORD_BYTES} has label {labels[wrong]}; labels are 0 to "
            f"{NUM_CLASSES - 1}. The file is damaged or not in the CIFAR-10 binary format."
        )
    return digest.digest()
