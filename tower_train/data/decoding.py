"""Decodes and resizes image files in TensorFlow, and turns them the right way up."""

import tensorflow as tf

from tower_train.data.orientation import orientation, turned

# The first bytes of each kind of file. (Other RIFF files begin like WebP.)
MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF8", "BMP": b"BM", "WebP": b"RIFF"}
MAX_PIXELS = 2**27  # of one file, as declared: 1.6 GB as float32 RGB
_HEAD = 2048  # bytes of a file that are read for its header
_GREYS = bytes(part for shade in range(256) for part in (shade, shade, shade, 0))  # a palette

# Offset of the width, followed by the height, and the weights of their bytes. A WebP image is never too large.
_LITTLE, _BIG = [1, 2**8, 2**16, 2**24], [2**24, 2**16, 2**8, 1]
_SIZES = {
    "PNG": (16, [_BIG + [0] * 4, [0] * 4 + _BIG]),
    "GIF": (6, [_LITTLE[:2] + [0] * 6, [0] * 2 + _LITTLE[:2] + [0] * 4]),
    "BMP": (18, [_LITTLE + [0] * 4, [0] * 4 + _LITTLE]),
    "WebP": (0, [[0] * 8] * 2),
}


def is_kind(contents: tf.Tensor, magic: bytes | tf.Tensor) -> tf.Tensor:
    """Returns whether a file's contents, a string scalar, begin with `magic`."""
    return tf.equal(tf.strings.substr(contents, 0, tf.strings.length(magic)), magic)


def declared_size(contents: tf.Tensor) -> tf.Tensor:
    """Returns int64 [2], the height and width that an image file's header declares; 0 for WebP."""

    def of_others():
        kind = tf.argmax(tf.cast([is_kind(contents, MAGIC[name]) for name in _SIZES], tf.int32), output_type=tf.int32)
        starts, weights = zip(*_SIZES.values(), strict=True)
        numbers = tf.cast(tf.io.decode_raw(_part(contents, tf.gather(starts, kind), 8), tf.uint8), tf.int64)
        width, height = tf.unstack(tf.linalg.matvec(tf.gather(tf.constant(weights, tf.int64), kind), numbers))
        return tf.stack([tf.minimum(height, 2**32 - height), width])  # negative in a BMP with rows from the top

    def of_jpeg():
        return tf.cast(tf.image.extract_jpeg_shape(contents)[:2], tf.int64)

    return tf.cond(is_kind(contents, MAGIC["JPEG"]), of_jpeg, of_others)


def _part(contents: tf.Tensor, start: int | tf.Tensor, count: int) -> tf.Tensor:
    """Returns `count` bytes of the head of a file's contents, from `start`; zeros beyond its end."""
    head = tf.strings.join([tf.strings.substr(contents, 0, _HEAD), tf.constant(bytes(_HEAD))])
    return tf.strings.substr(head, start, count)


def decode(contents: tf.Tensor, channels: int) -> tf.Tensor:
    """Decodes a file of a kind in MAGIC (an animation's first image), or fails with an op error.

    Args:
      contents: string scalar, of the file.
      channels: 1 for grayscale, 3 for RGB; the file may be either, or CMYK, or have 16 bits per channel.

    Returns:
      uint8 [height, width, channels], as stored: see `orientation`.
    """
    size = declared_size(contents)
    is_readable = (tf.reduce_prod(size) <= MAX_PIXELS) & (~is_kind(contents, MAGIC["BMP"]) | is_plain_bmp(contents))
    # Not tf.debugging.Assert, which builds two more functions.
    with tf.control_dependencies([tf.raw_ops.Assert(condition=is_readable, data=[size])]):
        contents = tf.identity(contents)
    # Always to RGB first: TensorFlow makes no grayscale of CMYK.
    image = tf.raw_ops.DecodeImage(contents=contents, channels=3, dtype=tf.uint8, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    return image if channels == 3 else tf.image.rgb_to_grayscale(image)


def is_plain_bmp(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a BMP file is uncompressed RGB or grey. TensorFlow ignores palettes."""

    def has_bits(bits: int) -> tf.Tensor:
        return tf.equal(_part(contents, 28, 6), bytes([bits, 0, 0, 0, 0, 0]))  # and no compression

    is_grey = (
        has_bits(8) & tf.equal(_part(contents, 14, 1), bytes([40])) & tf.equal(_part(contents, 54, len(_GREYS)), _GREYS)
    )
    return has_bits(24) | has_bits(32) | is_grey


def resized(image: tf.Tensor, height: int, width: int, orientation: tf.Tensor | None = None) -> tf.Tensor:
    """Resizes an image bilinearly with antialiasing, ignoring its aspect ratio, and turns it by its orientation: uint8
    [height, width, channels]."""
    if orientation is None:  # no image is turned
        upright = tf.image.resize(image, [height, width], antialias=True)
    else:
        size = tf.where(orientation >= 5, [width, height], [height, width])
        upright = turned(tf.image.resize(image, size, antialias=True), orientation)
    return tf.saturate_cast(tf.round(tf.ensure_shape(upright, [height, width, image.shape[-1]])), tf.uint8)


def decode_contents(contents: tf.Tensor, height: int, width: int, channels: int) -> tf.Tensor:
    """Decodes, resizes and turns an image file, see `decode` and `resized`: uint8 [height, width, channels]."""
    return resized(decode(contents, channels), height, width, orientation(contents))


def digest(contents: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar hash of a file's contents (FarmHash)."""
    return tf.strings.to_hash_bucket_fast(contents, 2**63 - 1)
