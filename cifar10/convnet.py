"""The network of the TensorFlow CIFAR-10 tutorial: two convolutions, two fully connected layers, a softmax layer."""

import numpy as np
import tensorflow as tf

from cifar10.convolution import convolution
from tower_train import layers

NUM_CLASSES = 10
WEIGHT_DECAY = 0.004
RADIUS, BIAS, ALPHA = 4, 1.0, 0.001 / 9.0  # for local response normalisation; its exponent is 0.75

v1 = tf.compat.v1


def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
    """Builds the network: images [batch, 24, 24, 3] to logits [batch, 10].

    Variables and arithmetic have the dtype of the images. The layers, their sizes, initial values and variable names
    are the tutorial's. Each layer's output is summarised.
    """
    del training  # layers do the same in training and evaluation
    with v1.variable_scope("conv1"):
        maps = convolution(images, _filters(images, 64))
        biases = layers.biases(maps)
        _observed(tf.nn.relu(tf.nn.bias_add(maps, biases)), "conv1")
    # Bias and relu keep the order of values, so they may follow the pooling, which leaves a quarter of the values.
    pool1 = tf.nn.relu(tf.nn.bias_add(_max_pool(maps), biases))
    norm1 = local_response_normalization(pool1)
    with v1.variable_scope("conv2"):
        maps = convolution(norm1, _filters(norm1, 64))
        conv2 = _observed(tf.nn.relu(tf.nn.bias_add(maps, layers.biases(maps, 0.1))), "conv2")
    pool2 = _max_pool(local_response_normalization(conv2))
    height, width, channels = pool2.shape[1:]
    with v1.variable_scope("local3"):
        flat = tf.reshape(pool2, [-1, height * width * channels])
        local3 = _observed(tf.nn.relu(layers.affine(flat, 384, _normal(0.04), WEIGHT_DECAY, bias=0.1)), "local3")
    with v1.variable_scope("local4"):
        local4 = _observed(tf.nn.relu(layers.affine(local3, 192, _normal(0.04), WEIGHT_DECAY, bias=0.1)), "local4")
    with v1.variable_scope("softmax_linear"):
        return _observed(layers.affine(local4, NUM_CLASSES, _normal(1 / 192)), "softmax_linear")


def local_response_normalization(inputs: tf.Tensor) -> tf.Tensor:
    """Divides each activation by a power of the energy in the channels around it.

        energy[..., c] = BIAS + ALPHA * sum_{|k - c| <= RADIUS} inputs[..., k]^2
        output[..., c] = inputs[..., c] * energy[..., c] ^ -0.75

    From Krizhevsky et al. 2012, section 3.3; equals `tf.nn.lrn(inputs, RADIUS, BIAS, ALPHA, beta=0.75)`, which is many
    times slower on a CPU and does not support float64. The window's sum is a banded matrix product. Two square roots
    are far faster than a general power. The gradient is written by hand: automatic differentiation of these operations
    would pass over memory twice as often.

    Args:
      inputs: floating point [..., channels], as is the result; the number of channels is static. Lower
        precisions than float32 are computed in float32.
    """
    channels = inputs.shape[-1]
    dtype = tf.float32 if inputs.dtype.size < 4 else inputs.dtype
    distances = np.abs(np.subtract.outer(np.arange(channels), np.arange(channels)))
    band = distances <= RADIUS  # symmetric: the gradient sums over the same window as the function
    is_convolution = layers.on_gpu() and inputs.shape.rank == 4  # works in any order of axes that TensorFlow chooses

    def window_sum(values, weight, bias=0.0):
        matrix = (band * weight).astype(dtype.as_numpy_dtype)
        if is_convolution:
            sums = tf.nn.conv2d(values, tf.constant(matrix[np.newaxis, np.newaxis]), strides=1, padding="SAME")
        else:
            sums = tf.matmul(tf.reshape(values, [-1, channels]), tf.constant(matrix))
        if bias:  # TensorFlow fuses bias_add into the matrix product, but not a plain sum
            sums = tf.nn.bias_add(sums, tf.fill([channels], tf.cast(bias, dtype)))
        return sums if is_convolution else tf.reshape(sums, tf.shape(values))

    @tf.custom_gradient
    def normalize(x):
        energy = window_sum(tf.square(x), ALPHA, BIAS)
        root = tf.math.rsqrt(energy)
        power = root * tf.sqrt(root)
        y = x * power

        def gradient(dy):
            spread = window_sum(dy * y / energy, 1.5 * ALPHA)
            return dy * power - x * spread

        return y, gradient

    return tf.cast(normalize(tf.cast(inputs, dtype)), inputs.dtype)


def _filters(inputs, count):
    return layers.weights([5, 5, inputs.shape[-1], count], inputs.dtype, _normal(5e-2))


def _normal(deviation):
    return v1.truncated_normal_initializer(stddev=deviation)


def _max_pool(maps):
    return tf.nn.max_pool2d(maps, ksize=3, strides=2, padding="SAME")


def _observed(activations, layer):
    """Summarises the activations as the tutorial does, and returns them; a step without summaries skips that."""
    observed = tf.identity(activations, name=layer)
    sparsity = tf.reduce_mean(tf.cast(tf.equal(observed, 0), tf.float32))
    with tf.device("/cpu:0"):  # GPUs have no kernels for summaries
        v1.summary.histogram("activations", observed)
        v1.summary.scalar("sparsity", sparsity)
    return activations
