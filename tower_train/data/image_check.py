"""The check of image files before training: each is decoded once, on all cores."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np
import tensorflow as tf

from tower_train import host
from tower_train.data import decoding, remarks
from tower_train.data.image_listing import Listing, kind_of
from tower_train.data.orientation import orientation

v1 = tf.compat.v1

_CHUNK = 512  # files decoded between two looks for libjpeg's remarks, which do not name the file
_PARTS = 8  # into which the files are divided to find the one


@dataclasses.dataclass(frozen=True)
class Checked:
    """The state of a listing's files.

    Attributes:
      bad: {index: fault of the file}.
      digests: int64 [images], of the contents of the others, see decoding.digest.
      orientations: uint8 [images], see orientation.
    """

    bad: dict[int, str]
    digests: np.ndarray
    orientations: np.ndarray


def check(listing: Listing, size: int, channels: int, pixels: np.ndarray | None = None) -> Checked:
    """Decodes every image once.

    A file about which libjpeg remarks something is bad even if it decodes: some of the image is made up.

    Args:
      listing: the images.
      size: height and width to decode to.
      channels: as for decoding.decode.
      pixels: gets the decoded images, uint8 [images, size, size, channels]; None to keep none.
    """
    count = len(listing.names)
    checked = Checked({}, np.zeros(count, np.int64), np.ones(count, np.uint8))
    paths, kinds = listing.paths(), [decoding.MAGIC[kind_of(name)] for name in listing.names]
    pending = [np.arange(i, min(i + _CHUNK, count)) for i in reversed(range(0, count, _CHUNK))]
    told = {}  # {index of a bad file: remark}
    with _decoder(size, channels, pixels is not None) as decode, remarks.of_decoders() as take_remark:
        while pending:
            indices, bad = pending.pop(), []
            found = decode([paths[i] for i in indices], [kinds[i] for i in indices])
            for index, values in zip(indices.tolist(), found, strict=True):
                if values is None:
                    bad.append(index)
                    continue
                checked.digests[index], checked.orientations[index], image = values
                if pixels is not None:
                    pixels[index] = image
            remark = take_remark()
            if remark and len(indices) > 1:  # about one of several files
                pending += np.array_split(indices, min(_PARTS, len(indices)))
                continue
            told |= dict.fromkeys(indices.tolist() if remark else bad, remark)
    if told:
        with _headers() as header:
            for index in sorted(told):
                checked.bad[index] = _what_is_wrong(paths[index], kinds[index], told[index], header)
    return checked


@contextlib.contextmanager
def _decoder(size: int, channels: int, resized: bool) -> Iterator[Callable]:
    """Yields a function (paths, first bytes) -> (digest, orientation, image or its maximum) of each file, None if it
    fails."""
    graph, feeds, fetches = _decoding(size, channels, resized)
    # One step per file instead of tf.data, which would have to start again to find the file of a remark.
    with v1.Session(graph=graph, config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        load = session.make_callable(fetches, feed_list=feeds)

        def load_if_possible(*file):
            with contextlib.suppress(tf.errors.OpError):
                return load(*file)

        with futures.ThreadPoolExecutor(host.cores()) as pool:
            yield functools.partial(pool.map, load_if_possible)


@functools.cache  # for the training images and the test images
def _decoding(size: int, channels: int, resized: bool) -> tuple[tf.Graph, list, list]:
    """Builds the graph of `_decoder`; returns it, its feeds and its fetches."""
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
        path, kind = v1.placeholder(tf.string, []), v1.placeholder(tf.string, [])
        contents = tf.io.read_file(path)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=decoding.is_kind(contents, kind), data=[path])]):
            contents = tf.identity(contents)
        image, turn = decoding.decode(contents, channels), orientation(contents)
        image = decoding.resized(image, size, size, turn) if resized else tf.reduce_max(image)
        return graph, [path, kind], [decoding.digest(contents), turn, image]


def _what_is_wrong(path: bytes, kind: bytes, remark: str, header: Callable) -> str:
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
    if remark:
        return f"is damaged or cut off ({remark})"
    height, width, is_plain_bmp = header(contents)
    if height * width > decoding.MAX_PIXELS:
        return f"declares {width} x {height} pixels, more than {decoding.MAX_PIXELS:,}"
    if kind == decoding.MAGIC["BMP"] and not is_plain_bmp:
        return "has a palette or is compressed, which TensorFlow does not read: convert it to PNG"
    if kind == decoding.MAGIC["WebP"] and b"ANIM" in contents[:64]:
        return "is an animation, which TensorFlow does not read as an image: convert it to PNG"
    return "is damaged or cut off"


def _any_kind() -> str:
    *others, last = decoding.MAGIC
    return f"{', '.join(others)} or {last}"


@contextlib.contextmanager
def _headers() -> Iterator[Callable[[bytes], tuple[int, int, bool]]]:
    """Yields a function from a file's contents to its declared (height, width, is a plain BMP); zeros if unknown."""
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        contents = v1.placeholder(tf.string, [])
        about = [decoding.declared_size(contents), decoding.is_plain_bmp(contents)]
        read = session.make_callable(about, feed_list=[contents])

        def header(contents):
            try:
                (height, width), is_plain = read(contents)
            except tf.errors.OpError:
                return 0, 0, False
            return int(height), int(width), bool(is_plain)

        yield header
