"""Decodes and resizes image files in TensorFlow, and turns them the right way up."""

import tensorflow as tf

from tower_train.data.orientation import orientation, turned

# What files of a kind begin with. (WebP files say a little later that they are not another RIFF file.)
MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF8", "BMP": b"BM", "WebP": b"RIFF"}
MAX_PIXELS = 2**27  # that a file may declare: 1.6 GB as float32 RGB
_GREYS = bytes(part for shade in range(256) for part in (shade, shade, shade, 0))  # a palette


def is_kind(contents: tf.Tensor, magic: bytes | tf.Tensor) -> tf.Tensor:
    """Whether a file's contents, a string scalar, begin so."""
    return tf.equal(tf.strings.substr(contents, 0, tf.strings.length(magic)), magic)


def declared_size(contents: tf.Tensor) -> tf.Tensor:
    """int64 [2], the height and width that the header of an image file declares; 0 for WebP, which is never large."""

    def numbers(start: int, weights: list[int]) -> tf.Tensor:
        digits = tf.io.decode_raw(tf.strings.substr(contents, start, 2 * len(weights)), tf.uint8)
        pair = tf.reshape(tf.cast(digits, tf.int64), [2, len(weights)])
        width, height = tf.unstack(tf.linalg.matvec(pair, tf.constant(weights, tf.int64)))
        return tf.stack([height, width])

    def of_bmp():
        height, width = tf.unstack(numbers(18, [1, 2**8, 2**16, 2**24]))
        return tf.stack([tf.minimum(height, 2**32 - height), width])  # negative: the rows are from the top

    return tf.case(
        [
            (is_kind(contents, MAGIC["PNG"]), lambda: numbers(16, [2**24, 2**16, 2**8, 1])),
            (is_kind(contents, MAGIC["GIF"]), lambda: numbers(6, [1, 2**8])),
            (is_kind(contents, MAGIC["BMP"]), of_bmp),
            (is_kind(contents, MAGIC["WebP"]), lambda: tf.zeros([2], tf.int64)),
        ],
        lambda: tf.cast(tf.image.extract_jpeg_shape(contents)[:2], tf.int64),
    )


def decode(contents: tf.Tensor, channels: int) -> tf.Tensor:
    """Decodes a file of a kind in MAGIC, of an animation the first image; an op error if it cannot be.

    Args:
      contents: string scalar, of the file.
      channels: 1 for grayscale, 3 for RGB; the file may be either, or CMYK, or of 16 bits a channel.

    Returns:
      uint8 [height, width, channels], as stored: see `orientation`.
    """
    size = declared_size(contents)
    checks = [
        tf.debugging.Assert(tf.reduce_prod(size) <= MAX_PIXELS, [size]),
        tf.debugging.Assert(~is_kind(contents, MAGIC["BMP"]) | is_plain_bmp(contents), ["a palette"]),
    ]
    with tf.control_dependencies(checks):
        contents = tf.identity(contents)
    # Always to RGB first: TensorFlow makes no grayscale of CMYK.
    image = tf.raw_ops.DecodeImage(contents=contents, channels=3, dtype=tf.uint8, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    return image if channels == 3 else tf.image.rgb_to_grayscale(image)


def is_plain_bmp(contents: tf.Tensor) -> tf.Tensor:
    """Whether a BMP file is uncompressed, in red, green and blue or in shades of grey: TensorFlow ignores palettes."""

    def part(start: int, count: int) -> tf.Tensor:
        long_enough = tf.strings.join([contents, tf.constant(bytes(start + count))])
        return tf.strings.substr(long_enough, start, count)

    def has_bits(bits: int) -> tf.Tensor:
        return tf.equal(part(28, 6), bytes([bits, 0, 0, 0, 0, 0]))  # and no compression

    is_grey = has_bits(8) & tf.equal(part(14, 1), bytes([40])) & tf.equal(part(54, len(_GREYS)), _GREYS)
    return has_bits(24) | has_bits(32) | is_grey


def resized(image: tf.Tensor, height: int, width: int, orientation: tf.Tensor) -> tf.Tensor:
    """Resizes an image bilinearly with antialiasing, without keeping its aspect, and turns it as its orientation says.

    Returns:
      uint8 [height, width, channels].
    """
    size = tf.where(orientation >= 5, [width, height], [height, width])
    image = turned(tf.image.resize(image, size, antialias=True), orientation)
    return tf.saturate_cast(tf.round(tf.ensure_shape(image, [height, width, image.shape[-1]])), tf.uint8)


def decode_contents(contents: tf.Tensor, height: int, width: int, channels: int) -> tf.Tensor:
    """Decodes, resizes and turns an image file, see `decode` and `resized`: uint8 [height, width, channels]."""
    return resized(decode(contents, channels), height, width, orientation(contents))


def digest(contents: tf.Tensor) -> tf.Tensor:
    """int64 scalar that follows a file's contents (FarmHash)."""
    return tf.strings.to_hash_bucket_fast(contents, 2**63 - 1)
