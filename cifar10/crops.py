"""Whole images for the deeper networks, shifted by up to four pixels and flipped for training.

He et al. 2015 ("Deep residual learning", section 4.2): pad each side by 4 pixels and take a 32 x 32 crop of
the padded image or its mirror image. Zeros are padded after normalisation, so the border has the mean colour.
"""

import numpy as np
import tensorflow as tf

from tower_train import layers, workload

SIZE = 32
PADDING = 4

# Of each channel over the 50,000 training images, in grey levels.
MEAN = np.array([125.307, 122.950, 113.865], np.float32)
DEVIATION = np.array([62.993, 62.089, 66.705], np.float32)
# For each value of a row: broadcasting over a last dimension of 3 takes several times as long.
_ROW_MEAN, _PER_ROW_DEVIATION = np.tile(MEAN, SIZE), np.tile(1 / DEVIATION, SIZE)


def prepare(images: tf.Tensor) -> tf.Tensor:
    """Subtracts the mean and divides by the deviation of each channel: uint8 [batch, 32, 32, 3] to float32."""
    # A product: TensorFlow turns division by a constant into one in some graphs, but not in input pipelines.
    rows = tf.reshape(tf.cast(images, tf.float32), [-1, SIZE * 3])
    return tf.reshape((rows - _ROW_MEAN) * _PER_ROW_DEVIATION, tf.shape(images))


def augment(images: tf.Tensor, draws: workload.Draws) -> tf.Tensor:
    """Prepares images, shifts them by up to 4 pixels each way, fills with zeros, and flips half of them left to right.

    From uint8 [batch, 32, 32, 3] to float32.
    """
    row, column, flip = tf.split(draws.uniform("crop", 3), 3, axis=1)
    top, left = (tf.floor((2 * PADDING + 1) * place) - PADDING for place in (row, column))
    return crop(prepare(images), top, left, flip < 0.5, SIZE)


def crop(images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor, size: int) -> tf.Tensor:
    """Crops each image at its own place and flips some of the crops left to right.

    On a GPU pixels are gathered, which XLA can compile. On a CPU `crop_and_resize` does both in one pass: a box of the
    size of the crop resizes nothing, one with swapped sides flips, and pixels outside the image become 0. Boxes are in
    fractions of the image. They end a quarter of a pixel inside the outermost pixels of the crop, so that rounding
    their coordinates neither picks a neighbouring pixel nor leaves the image.

    Top and left are float32 [batch, 1] of whole numbers, flip is bool [batch, 1].
    """
    if layers.on_gpu():
        return _gathered(images, top, left, flip, size)
    inset = 0.25
    bottom, right = top + (size - 1 - inset), left + (size - 1 - inset)
    top, left = top + inset, left + inset
    boxes = tf.concat([top, tf.where(flip, right, left), bottom, tf.where(flip, left, right)], axis=1) / (SIZE - 1)
    every_image = tf.range(tf.shape(images)[0])
    return tf.image.crop_and_resize(images, boxes, every_image, [size, size], method="nearest")


def _gathered(images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor, size: int) -> tf.Tensor:
    """Does what `crop` does. Places are int64, since GPUs compute with int32 on the host."""
    places = tf.range(size, dtype=tf.int64)
    rows = tf.cast(top, tf.int64) + places
    columns = tf.cast(left, tf.int64) + tf.where(flip, size - 1 - places, places)
    cropped = gather(images, _inside(rows), _inside(columns))
    is_inside = (tf.equal(rows, _inside(rows))[:, :, tf.newaxis], tf.equal(columns, _inside(columns))[:, tf.newaxis, :])
    return tf.where((is_inside[0] & is_inside[1])[..., tf.newaxis], cropped, tf.zeros([], images.dtype))


def gather(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Takes rows and columns, int64 [batch, size], of each image."""
    return tf.gather(tf.gather(images, rows, batch_dims=1), columns, axis=2, batch_dims=1)


def _inside(places: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(places, np.int64(0), np.int64(SIZE - 1))
