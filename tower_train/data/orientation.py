"""The EXIF orientation of JPEG files, read and applied in TensorFlow, which ignores it."""

import tensorflow as tf

_HEAD = 2**17  # bytes that hold the Exif segment up to its orientation; a segment has at most 2**16
_EXIF = b"\xff\xe1..Exif\0\0"  # the marker APP1, two bytes of length, and Exif's magic
_ORIENTATION = 0x112  # the tag's number, CIPA DC-008 (Exif 2.3), section 4.6.4
_ENTRY = 12  # bytes of a tag in a TIFF directory
_MOST_TAGS = 1000


def orientation(contents: tf.Tensor) -> tf.Tensor:
    """Reads an image's orientation from string scalar contents of its file: int64 scalar, 1 to 8, as Exif defines it; 1
    (as it is) if the file does not say, and for other formats."""
    head = tf.cast(tf.io.decode_raw(tf.strings.substr(contents, 0, _HEAD), tf.uint8), tf.int64)
    head = tf.concat([head, tf.zeros([len(_EXIF)], tf.int64)], axis=0)
    return _tag_value(head, _exif_start(head))


def turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns and mirrors a [height, width, channels] image by its orientation."""

    def is_one_of(*values: int) -> tf.Tensor:
        return tf.reduce_any(tf.equal(orientation, tf.constant(values, tf.int64)))

    def turn():
        upright = tf.transpose(image, tf.where(orientation >= 5, [1, 0, 2], [0, 1, 2]))
        return tf.reverse(upright, tf.boolean_mask([0, 1], [is_one_of(3, 4, 7, 8), is_one_of(2, 3, 6, 7)]))

    return tf.cond(orientation > 1, turn, lambda: image)


def _exif_start(head: tf.Tensor) -> tf.Tensor:
    """Returns the offset of the TIFF header of the Exif segment in a file's bytes; 0 if there is none."""
    wanted = tf.constant(list(_EXIF), tf.int64)
    compared = tf.constant([byte != ord(".") for byte in _EXIF])

    def is_exif(segment):
        return tf.reduce_all(tf.equal(_bytes(head, segment, len(_EXIF)), wanted) | ~compared)

    def is_other(segment):
        """Returns whether a segment is an application's or a comment, which come before image data."""
        first, marker = tf.unstack(_bytes(head, segment, 2))
        is_passed_over = ((marker >= 0xE0) & (marker <= 0xEF)) | tf.equal(marker, 0xFE)
        return tf.equal(first, 0xFF) & is_passed_over & ~is_exif(segment)

    def following(segment):
        return [segment + 2 + tf.maximum(_number(head, segment + 2, 2, tf.constant(False)), 2)]

    [found] = tf.while_loop(is_other, following, [tf.constant(2, tf.int64)])
    return tf.where(is_exif(found), found + len(_EXIF), 0)


def _tag_value(head: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Returns the orientation in a TIFF header's first directory; 1 if there is none, or no header (start is 0)."""
    little = tf.equal(_bytes(head, start, 1)[0], ord("I"))
    directory = start + _number(head, start + 4, 4, little)
    count = tf.where(start > 0, tf.minimum(_number(head, directory, 2, little), _MOST_TAGS), 0)
    entries = directory + 2 + _ENTRY * tf.range(count)
    is_orientation = tf.equal(_number(head, entries, 2, little), _ORIENTATION)
    values = tf.boolean_mask(_number(head, entries + 8, 2, little), is_orientation)
    value = tf.concat([values, [1]], axis=0)[0]
    return tf.where((value >= 1) & (value <= 8), value, 1)


def _bytes(head: tf.Tensor, offsets: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the bytes from each offset on, int64 [..., count]; zeros beyond the end."""
    places = offsets[..., tf.newaxis] + tf.range(count, dtype=tf.int64)
    return tf.gather(head, tf.minimum(places, tf.size(head, out_type=tf.int64) - 1))


def _number(head: tf.Tensor, offsets: tf.Tensor, count: int, little: tf.Tensor) -> tf.Tensor:
    """Returns the whole number in `count` bytes from each offset on, the lowest byte first if little."""
    weights = tf.constant([256**i for i in range(count)], tf.int64)
    return tf.reduce_sum(_bytes(head, offsets, count) * tf.where(little, weights, tf.reverse(weights, [0])), axis=-1)
