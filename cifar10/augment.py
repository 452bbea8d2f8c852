"""Preprocessing of images for the network: random augmentation for training, a plain crop for evaluation.

The published `distorted_inputs` crops, flips, adds a random brightness, scales the contrast of each channel about its
mean and standardises the image. Once the crop is chosen, all of that is affine in each channel. With m[c] and v[c] the
mean and the variance of channel c over the crop, M and V the means of m and v over the channels, d the brightness and
f the contrast:

    after brightness and contrast:  f * (x - m[c]) + m[c] + d,  of mean M + d and variance f^2 * V + mean((m - M)^2)
    standardised:                   (f * (x - m[c]) + m[c] - M) / max(deviation, 1 / sqrt(values in the crop))

The brightness cancels: it only moves the image's mean, so it is not drawn. What remains is two passes over the pixels,
one for the sums and one for the affine map.

An image's result is the same to the last bit in any batch: the sums are of integers, which float32 adds exactly in any
order, and everything else is computed image by image.
"""

import functools

import numpy as np
import tensorflow as tf

from cifar10 import crops
from tower_train import layers, workload

CROP_SIZE = 24
CHANNELS = 3
MIN_CONTRAST, MAX_CONTRAST = 0.2, 1.8

_PIXELS = CROP_SIZE * CROP_SIZE
_VALUES = _PIXELS * CHANNELS

# Matrices of zeros and ones that sum over pixels, and copy a channel's number to its pixels. On CPUs such products are
# several times faster than sums over a last dimension of 3; GPUs are fast at both, but may round factors to 10 bits.
_SUM_CHANNELS = np.tile(np.eye(CHANNELS, dtype=np.float32), [_PIXELS, 1])
_COPY_TO_PIXELS = np.ascontiguousarray(_SUM_CHANNELS.T)
# Squares are added up in eight parts, because float32 holds all integers only up to 2^24: 1728 / 8 * 255^2 < 2^24.
_SUM_EIGHTHS = np.repeat(np.eye(8, dtype=np.float32), _VALUES // 8, axis=0)


def augment(images: tf.Tensor, draws: workload.Draws) -> tf.Tensor:
    """Crops and flips at random, changes the contrast at random and standardises.

    From uint8 [batch, 32, 32, 3] to float32 [batch, 24, 24, 3]; each image has mean 0 and, unless it is nearly
    constant, variance 1.
    """
    row, column, flip, contrast = tf.split(draws.uniform("distort", 4), 4, axis=1)
    places = crops.SIZE - CROP_SIZE + 1
    images = tf.cast(images, tf.float32)  # GPUs have no crops of uint8
    cropped = crops.crop(images, tf.floor(places * row), tf.floor(places * column), flip < 0.5, CROP_SIZE)
    return _standardize(cropped, MIN_CONTRAST + (MAX_CONTRAST - MIN_CONTRAST) * contrast)


def prepare(images: tf.Tensor) -> tf.Tensor:
    """Standardises the central crop, for evaluation: uint8 [batch, 32, 32, 3] to float32 [batch, 24, 24, 3]."""
    first = (crops.SIZE - CROP_SIZE) // 2
    central = images[:, first : first + CROP_SIZE, first : first + CROP_SIZE]
    return _standardize(tf.cast(central, tf.float32), tf.ones([1, 1]))


def _standardize(images: tf.Tensor, contrast: tf.Tensor) -> tf.Tensor:
    """Changes the contrast and standardises, with the formulas at the head of this module.

    Images are float32 [batch, 24, 24, 3] of whole numbers from 0 to 255, the contrast is float32 [batch or 1, 1].
    """
    mean_of_row = functools.partial(tf.reduce_mean, axis=1, keepdims=True)
    values = tf.reshape(images, [-1, _VALUES])
    on_gpu = layers.on_gpu()
    if on_gpu:
        sums = tf.reduce_sum(tf.reshape(values, [-1, _PIXELS, CHANNELS]), axis=1)
        squares = tf.reduce_sum(tf.reshape(tf.square(values), [-1, 8, _VALUES // 8]), axis=2)
    else:
        sums, squares = tf.matmul(values, _SUM_CHANNELS), tf.matmul(tf.square(values), _SUM_EIGHTHS)
    sums, squares = tf.cast(sums, tf.float64), tf.cast(squares, tf.float64)
    means = sums / _PIXELS
    offsets = means - mean_of_row(means)
    within = tf.reduce_sum(squares, axis=1, keepdims=True) / _VALUES - mean_of_row(tf.square(means))
    contrast = tf.cast(contrast, tf.float64)
    deviation = tf.sqrt(tf.square(contrast) * within + mean_of_row(tf.square(offsets)))
    scale = 1.0 / tf.maximum(deviation, _VALUES**-0.5)
    centres = tf.round(means)  # subtracted first, and exactly: a nearly constant image has a large gain
    gain = contrast * scale * tf.ones_like(means)
    shift = offsets * scale - gain * (means - centres)
    by_channel = [tf.cast(t, tf.float32) for t in (centres, gain, shift)]
    if on_gpu:
        centres, gain, shift = (tf.tile(t, [1, _PIXELS]) for t in by_channel)
    else:
        centres, gain, shift = (tf.matmul(t, _COPY_TO_PIXELS) for t in by_channel)
    return tf.reshape((values - centres) * gain + shift, [-1, CROP_SIZE, CROP_SIZE, CHANNELS])
