"""The check of image files before training: every one is decoded once, on all cores."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import tensorflow as tf

from tower_train import console, host
from tower_train.data import decoding
from tower_train.data.image_listing import Listing, kind_of
from tower_train.data.orientation import orientation

v1 = tf.compat.v1

_CHUNK = 512  # files decoded between two looks at what libjpeg remarks, which does not say of which file
_PARTS = 8  # that the files are divided into to find the one
_BATCH = 16
# Lines of others: of our own and of TensorFlow's logging, but for those of its decoders.
_LOG_LINE = re.compile(
    rb"tower_train: |(\d{4}-\d\d-\d\d |[IWEF]\d{4} |WARNING)(?!.*(jpeg|png|gif|webp|bmp|image)\w*\.cc)"
)
_LOG_HEAD = re.compile(r"^[^\]]*\.cc:\d+\] ")


@dataclasses.dataclass(frozen=True)
class Checked:
    """The state of a listing's files.

    Attributes:
      bad: {index: what is wrong with the file}.
      digests: int64 [images], of the contents of the others, see decoding.digest.
      orientations: uint8 [images], see orientation.
    """

    bad: dict[int, str]
    digests: np.ndarray
    orientations: np.ndarray


def check(listing: Listing, size: int, channels: int, pixels: np.ndarray | None = None) -> Checked:
    """Decodes every image once.

    A file that libjpeg remarks something about is bad, although it makes an image of it: some of that is made up.

    Args:
      listing: the images.
      size: height and width to decode to.
      channels: as for decoding.decode.
      pixels: where the decoded images go, uint8 [images, size, size, channels]; None to keep none.
    """
    count = len(listing.names)
    checked = Checked({}, np.zeros(count, np.int64), np.ones(count, np.uint8))
    paths, kinds = listing.paths(), [decoding.MAGIC[kind_of(name)] for name in listing.names]
    pending = [np.arange(i, min(i + _CHUNK, count)) for i in reversed(range(0, count, _CHUNK))]
    with _decoder(paths, kinds, size, channels, pixels is not None) as decode, _remarks_of_decoders() as take_remarks:
        while pending:
            indices = pending.pop()
            bad = set(indices.tolist())
            for found, digests, orientations, images in decode(indices):
                checked.digests[found], checked.orientations[found] = digests, orientations
                if pixels is not None:
                    pixels[found] = images
                bad.difference_update(found.tolist())
            remark = take_remarks()
            if remark and len(indices) > 1:
                pending += np.array_split(indices, min(_PARTS, len(indices)))
                continue
            for index in indices if remark else sorted(bad):
                checked.bad[int(index)] = _what_is_wrong(paths[index], kinds[index], remark)
    return dataclasses.replace(checked, bad=dict(sorted(checked.bad.items())))


@contextlib.contextmanager
def _decoder(paths: list[bytes], kinds: list[bytes], size: int, channels: int, resized: bool):
    """Yields a function from int64 indices to batches of (indices, digests, orientations, images or something that
    depends on each) of those that can be decoded, in any order."""

    def load(index, path, kind):
        contents = tf.io.read_file(path)
        with tf.control_dependencies([tf.debugging.Assert(decoding.is_kind(contents, kind), [path])]):
            contents = tf.identity(contents)
        image, turn = decoding.decode(contents, channels), orientation(contents)
        image = decoding.resized(image, size, size, turn) if resized else tf.reduce_max(image)
        return index, decoding.digest(contents), tf.cast(turn, tf.uint8), image

    with tf.Graph().as_default(), tf.device("/cpu:0"):
        fed = [v1.placeholder(dtype, [None]) for dtype in (tf.int64, tf.string, tf.string)]
        dataset = tf.data.Dataset.from_tensor_slices(tuple(fed))
        dataset = dataset.map(load, num_parallel_calls=host.cores(), deterministic=False)
        dataset = dataset.ignore_errors().batch(_BATCH).prefetch(2)
        iterator = v1.data.make_initializable_iterator(dataset)
        batch = iterator.get_next()
        with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:

            def decode(indices: np.ndarray) -> Iterator[tuple]:
                values = indices, [paths[i] for i in indices], [kinds[i] for i in indices]
                session.run(iterator.initializer, dict(zip(fed, values, strict=True)))
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while True:
                        yield session.run(batch)

            yield decode


@contextlib.contextmanager
def _remarks_of_decoders():
    """Keeps what C libraries write to standard error within this block; yields a function that returns the first line
    of it since its last call, or an empty string. Log lines are passed on at the end."""
    passed_on = []
    try:
        with console.stderr_in_file() as file:

            def take() -> str:
                lines = _emptied(file).splitlines()
                passed_on.extend(line for line in lines if _LOG_LINE.match(line))
                remarks = (line.decode(errors="replace") for line in lines if not _LOG_LINE.match(line))
                return _LOG_HEAD.sub("", next(remarks, ""))

            try:
                yield take
            finally:
                take()
    finally:
        for line in passed_on:
            os.write(2, line + b"\n")


def _emptied(file: BinaryIO) -> bytes:
    """Returns what is in the file, and removes it."""
    file.seek(0)
    contents = file.read()
    file.seek(0)
    file.truncate()
    return contents


def _what_is_wrong(path: bytes, kind: bytes, remark: str) -> str:
    try:
        with open(path, "rb") as file:
            contents = file.read()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not contents:
        return "is empty"
    if not contents.startswith(kind):
        others = [name for name, magic in decoding.MAGIC.items() if contents.startswith(magic)]
        return f"is a {others[0]} image by its content" if others else f"is no {_any_kind()} image"
    height, width, is_plain_bmp = _about(contents)
    if height * width > decoding.MAX_PIXELS:
        return f"declares {width} x {height} pixels, more than {decoding.MAX_PIXELS:,}"
    if kind == decoding.MAGIC["BMP"] and not is_plain_bmp:
        return "has a palette or is compressed, which TensorFlow does not read: convert it to PNG"
    if kind == decoding.MAGIC["WebP"] and b"ANIM" in contents[:64]:
        return "is an animation, which TensorFlow does not read as an image: convert it to PNG"
    return "is damaged or cut off" + (f" ({remark})" if remark else "")


def _any_kind() -> str:
    *others, last = decoding.MAGIC
    return f"{', '.join(others)} or {last}"


def _about(contents: bytes) -> tuple[int, int, bool]:
    """The declared height and width, and whether a BMP is plain; zeros where that cannot be told."""
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        text = tf.constant(contents)
        try:
            return *session.run(decoding.declared_size(text)).tolist(), session.run(decoding.is_plain_bmp(text))
        except tf.errors.OpError:
            return 0, 0, False
