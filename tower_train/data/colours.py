"""Colours of images, changed for a whole batch at a time: what torchvision does with Pillow.

Images are float32 [batch, height, width, 1 or 3] of whole numbers from 0 to 255, as are the results. Each result is
that of the image alone, to the bit: sums are of whole numbers that their type holds exactly, and no division by a
constant falls on a whole number, as TensorFlow turns it into a product in some graphs.
"""

import itertools

import tensorflow as tf

from tower_train.workload import Draws

_SATURATION, _CONTRAST = 1, 2  # 0 is brightness


def color_jitter(images: tf.Tensor, draws: Draws, most: float) -> tf.Tensor:
    """Changes brightness, contrast and saturation, in a random order, by factors from 1 - most to 1 + most."""
    numbers, least = draws.uniform("color_jitter", 4), max(0.0, 1 - most)
    factors = least + (1 + most - least) * numbers[:, :3]
    orders = tf.constant(list(itertools.permutations(range(3))), tf.int64)
    order = tf.gather(orders, tf.cast(tf.floor(6 * numbers[:, 3]), tf.int64))
    images = tf.cast(images, tf.float32)
    for turn in range(3):
        images = _coloured(images, order[:, turn], tf.gather(factors, order[:, turn], batch_dims=1))
    return images


def spread(numbers: tf.Tensor) -> tf.Tensor:
    """Gives numbers of images [batch] the dimensions of images."""
    return numbers[:, tf.newaxis, tf.newaxis, tf.newaxis]


def _coloured(images: tf.Tensor, kinds: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Changes brightness, saturation or contrast of each image (kind 0, 1 or 2) by a factor."""
    gray, kinds = _gray(images), spread(kinds)
    # float32 holds the sums of columns, float64 that of all.
    sums = tf.reduce_sum(tf.cast(tf.reduce_sum(gray, axis=1, keepdims=True), tf.float64), axis=2, keepdims=True)
    mean = tf.cast(tf.floor((sums + 0.01) * (1 / (images.shape[1] * images.shape[2])) + 0.5), tf.float32)
    degenerate = tf.where(tf.equal(kinds, _CONTRAST), mean, tf.zeros_like(mean))
    return _blended(images, tf.where(tf.equal(kinds, _SATURATION), gray, degenerate), factors)


def _blended(images: tf.Tensor, degenerate: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Moves images to or, by a factor above 1, away from their degenerate ones: Pillow's ImageEnhance."""
    return tf.floor(tf.clip_by_value(degenerate + spread(factors) * (images - degenerate), 0, 255))


def _gray(images: tf.Tensor) -> tf.Tensor:
    """Returns the luma of ITU-R 601-2 as Pillow rounds it, [batch, height, width, 1]."""
    if images.shape[3] == 1:
        return images
    red, green, blue = tf.split(images, 3, axis=3)
    return tf.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)  # below 2^24: exact
