"""What happens to an image before the network sees it: random distortion for training, a plain crop for evaluation.

The published `distorted_inputs` crops, flips, adds a random brightness, scales the contrast of each channel about its
mean and standardises the image. Once the crop is chosen, all of that is affine in each channel. With m[c] and v[c] the
mean and the variance of channel c over the crop, M the mean of m, d the brightness and f the contrast:

    after brightness and contrast:  f * (x - m[c]) + m[c] + d,  of mean M + d and variance f^2 * mean(v) + mean((m - M)^2)
    standardised:                   (f * (x - m[c]) + m[c] - M) / max(deviation, 1 / sqrt(values in the crop))

The brightness is gone: it moves the mean of the image and nothing else, so it is not drawn. The other steps are two
passes over the pixels, one for the sums and one for the affine map.

An image's result does not depend on the batch it is computed in, to the last bit: the sums are of integers that float32
holds exactly, and the rest is rounded the same way in every lane.
"""

import tensorflow as tf

from tower_train import workload

RAW_SIZE = 32
CROP_SIZE = 24
CHANNELS = 3
MIN_CONTRAST, MAX_CONTRAST = 0.2, 1.8


def distort(images: tf.Tensor, draws: workload.Draws) -> tf.Tensor:
    """A random crop, a random left-right flip, a random contrast and standardisation.

    Args:
      images: uint8 [batch, 32, 32, 3].
      draws: the random numbers of this batch.

    Returns:
      float32 [batch, 24, 24, 3], each image with mean 0 and, unless it is nearly constant, variance 1.
    """
    places = RAW_SIZE - CROP_SIZE + 1
    offsets = tf.cast(draws.uniform("crop", 2) * places, tf.int32)
    flip = draws.uniform("flip", 1) < 0.5
    contrast = MIN_CONTRAST + (MAX_CONTRAST - MIN_CONTRAST) * draws.uniform("contrast", 1)
    steps = tf.range(CROP_SIZE)
    rows = offsets[:, :1] + steps
    columns = offsets[:, 1:] + tf.where(flip, CROP_SIZE - 1 - steps, steps)
    pixels = tf.reshape(images, [-1, RAW_SIZE * RAW_SIZE, CHANNELS])
    crops = tf.gather(pixels, RAW_SIZE * rows[:, :, tf.newaxis] + columns[:, tf.newaxis, :], batch_dims=1)
    return _standardize(crops, contrast)


def prepare(images: tf.Tensor) -> tf.Tensor:
    """The central crop, standardised: what evaluation sees.

    Args:
      images: uint8 [batch, 32, 32, 3].

    Returns:
      float32 [batch, 24, 24, 3].
    """
    start = (RAW_SIZE - CROP_SIZE) // 2
    return _standardize(images[:, start : start + CROP_SIZE, start : start + CROP_SIZE], contrast=None)


def _standardize(crops: tf.Tensor, contrast: tf.Tensor | None) -> tf.Tensor:
    """Contrast and standardisation, see the head of this module.

    Args:
      crops: uint8 [batch, 24, 24, 3].
      contrast: float32 [batch, 1], or None for 1.
    """
    centred = tf.cast(crops, tf.float32) - 128.0  # sums of squares stay below 2^24, where float32 still counts exactly
    count = CROP_SIZE * CROP_SIZE
    means = tf.cast(tf.reduce_sum(centred, axis=[1, 2]), tf.float64) / count
    squares = tf.cast(tf.reduce_sum(tf.square(centred), axis=[1, 2]), tf.float64) / count
    within = tf.reduce_mean(squares - tf.square(means), axis=1, keepdims=True)
    mean = tf.reduce_mean(means, axis=1, keepdims=True)
    between = tf.reduce_mean(tf.square(means - mean), axis=1, keepdims=True)
    factor = tf.ones_like(mean) if contrast is None else tf.cast(contrast, tf.float64)
    deviation = tf.sqrt(tf.square(factor) * within + between)
    scale = 1.0 / tf.maximum(deviation, (count * CHANNELS) ** -0.5)
    gain = factor * scale
    shift = (means - mean) * scale - gain * means
    gain, shift = (tf.cast(t, tf.float32)[:, tf.newaxis, tf.newaxis, :] for t in (gain, shift))
    return centred * gain + shift
