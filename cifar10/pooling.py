"""Pooling of maps that lie pixels first, as `convolution` likes them."""

import tensorflow as tf


def max_pool(maps: tf.Tensor, size: int) -> tf.Tensor:
    """Takes the greatest value of each size x size window; windows do not overlap, and what fills none is left out.

    From [height, width, batch, channels] to [height // size, width // size, batch, channels].
    """
    if maps.dtype == tf.float64:  # which TensorFlow does not pool in three dimensions
        pooled = tf.nn.max_pool2d(tf.transpose(maps, [2, 0, 1, 3]), size, size, "VALID")
        return tf.transpose(pooled, [1, 2, 0, 3])
    # As one image of three dimensions, in which only two are pooled: TensorFlow wants the pixels inside the batch.
    window = [1, size, size, 1, 1]
    return tf.squeeze(tf.nn.max_pool3d(tf.expand_dims(maps, 0), window, window, "VALID"), 0)
