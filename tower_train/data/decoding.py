"""Decodes and resizes image files in TensorFlow, on all cores, and finds those that cannot be."""

import os
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import host
from tower_train.data.image_files import EXTENSIONS, Listing

v1 = tf.compat.v1

_MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
_BATCH = 16
MAX_PIXELS = 2**27  # that a file may declare: 1.6 GB as float32 RGB


def find_bad(listing: Listing, size: int, channels: int, pixels: np.ndarray | None = None) -> dict[int, str]:
    """Decodes every image once.

    Args:
      listing: the images.
      size: height and width to decode to.
      channels: as for `decode_contents`.
      pixels: where the decoded images go, uint8 [images, size, size, channels]; None to keep none.

    Returns:
      {index: what is wrong with the file}, without those that are as they should be.
    """
    paths = listing.paths()
    kinds = [_MAGIC[EXTENSIONS[os.path.splitext(name)[1].lower()]] for name in listing.names]
    bad = set(range(len(paths)))
    for indices, images in _decoded(paths, kinds, size, channels, resized=pixels is not None):
        if pixels is not None:
            pixels[indices] = images
        bad.difference_update(indices.tolist())
    return {index: _what_is_wrong(paths[index], kinds[index]) for index in sorted(bad)}


def _declared_size(contents: tf.Tensor) -> tf.Tensor:
    """int64 [2], the height and width that the header of a JPEG or PNG file declares."""

    def of_png():
        digits = tf.cast(tf.io.decode_raw(tf.strings.substr(contents, 16, 8), tf.uint8), tf.int64)
        width, height = tf.unstack(
            tf.linalg.matvec(tf.reshape(digits, [2, 4]), tf.constant([2**24, 2**16, 2**8, 1], tf.int64))
        )
        return tf.stack([height, width])

    def of_jpeg():
        return tf.cast(tf.image.extract_jpeg_shape(contents)[:2], tf.int64)

    magic = _MAGIC["PNG"]
    return tf.cond(tf.equal(tf.strings.substr(contents, 0, len(magic)), magic), of_png, of_jpeg)


def _decode(contents: tf.Tensor, channels: int) -> tf.Tensor:
    size = _declared_size(contents)
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_prod(size) <= MAX_PIXELS, [size])]):
        contents = tf.identity(contents)
    # Always to RGB first: TensorFlow makes no grayscale of CMYK.
    image = tf.raw_ops.DecodeImage(contents=contents, channels=3, dtype=tf.uint8, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    return image if channels == 3 else tf.image.rgb_to_grayscale(image)


def decode_contents(contents: tf.Tensor, height: int, width: int, channels: int) -> tf.Tensor:
    """Decodes a JPEG or PNG file and resizes it bilinearly with antialiasing, without keeping its aspect.

    Args:
      contents: string scalar, of the file.
      height: of the result.
      width: of the result.
      channels: 1 for grayscale, 3 for RGB; the file may be either, or CMYK, or of 16 bits a channel.

    Returns:
      uint8 [height, width, channels].
    """
    resized = tf.image.resize(_decode(contents, channels), [height, width], antialias=True)
    return tf.saturate_cast(tf.round(resized), tf.uint8)


def _decoded(paths, kinds, size: int, channels: int, resized: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (int64 [batch] indices, images or something that depends on each) of all images that can be decoded."""

    def load(index, path, kind):
        contents = tf.io.read_file(path)
        is_kind = tf.equal(tf.strings.substr(contents, 0, tf.strings.length(kind)), kind)
        with tf.control_dependencies([tf.debugging.Assert(is_kind, [path])]):
            contents = tf.identity(contents)
        return index, decode_contents(contents, size, size, channels) if resized else tf.reduce_max(
            _decode(contents, channels)
        )

    with tf.Graph().as_default(), tf.device("/cpu:0"):
        # Fed, since a graph holds at most 2 GiB.
        fed = [v1.placeholder(tf.string, [len(paths)]) for _ in range(2)]
        dataset = tf.data.Dataset.from_tensor_slices((tf.range(len(paths), dtype=tf.int64), *fed))
        dataset = dataset.map(load, num_parallel_calls=host.cores(), deterministic=False)
        dataset = dataset.ignore_errors().batch(_BATCH).prefetch(2)
        iterator = v1.data.make_initializable_iterator(dataset)
        batch = iterator.get_next()
        with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
            session.run(iterator.initializer, dict(zip(fed, (paths, kinds), strict=True)))
            while True:
                try:
                    yield session.run(batch)
                except tf.errors.OutOfRangeError:
                    return


def _what_is_wrong(path: bytes, kind: bytes) -> str:
    try:
        with open(path, "rb") as file:
            contents = file.read()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not contents:
        return "is empty"
    if not contents.startswith(kind):
        others = [name for name, magic in _MAGIC.items() if contents.startswith(magic)]
        return f"is a {others[0]} image by its content" if others else "is neither a JPEG nor a PNG image"
    height, width = _size_or_zeros(contents)
    if height * width > MAX_PIXELS:
        return f"declares {width} x {height} pixels, more than {MAX_PIXELS:,}"
    return "is damaged or cut off"


def _size_or_zeros(contents: bytes) -> tuple[int, int]:
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        try:
            return tuple(session.run(_declared_size(tf.constant(contents))).tolist())
        except tf.errors.OpError:
            return 0, 0
