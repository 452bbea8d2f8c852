"""Local response normalisation across channels, as a banded matrix product.

`tf.nn.lrn` computes the same function, but slowly on a CPU and not in float64.
"""

import numpy as np
import tensorflow as tf


def local_response_normalization(
    inputs: tf.Tensor, depth_radius: int = 4, bias: float = 1.0, alpha: float = 0.001 / 9.0
) -> tf.Tensor:
    """Divides each activation by a power of the energy in the channels around it.

        output[..., c] = inputs[..., c] * (bias + alpha * sum_{|k - c| <= depth_radius} inputs[..., k]^2) ^ -0.75

    From Krizhevsky et al. 2012, section 3.3; equals `tf.nn.lrn(inputs, depth_radius, bias, alpha, beta=0.75)`. The
    exponent is fixed at 3/4 because two square roots give it far faster than a general power.

    Args:
      inputs: floating point [..., channels]; the number of channels is static.
      depth_radius: how many channels on either side count.
      bias: positive; keeps the divisor away from 0.
      alpha: weight of the energy, not divided by the number of channels in the sum.

    Returns:
      A tensor of the shape and dtype of inputs.
    """
    channels = inputs.shape[-1]
    distance = np.abs(np.subtract.outer(np.arange(channels), np.arange(channels)))
    band = tf.constant((distance <= depth_radius).astype(inputs.dtype.as_numpy_dtype))

    def window_sum(values):
        rows = tf.reshape(values, [-1, channels])
        return tf.reshape(tf.matmul(rows, band), tf.shape(values))

    @tf.custom_gradient
    def normalize(x):
        energy = bias + alpha * window_sum(tf.square(x))
        root = tf.math.rsqrt(energy)
        power = root * tf.sqrt(root)
        y = x * power

        def gradient(dy):
            return dy * power - (1.5 * alpha) * x * window_sum(dy * y / energy)

        return y, gradient

    return normalize(inputs)
