"""The network of the TensorFlow CIFAR-10 tutorial: two convolutions, two fully connected layers, a softmax layer."""

import zlib

import tensorflow as tf

from cifar10 import normalization

NUM_CLASSES = 10
WEIGHT_DECAY = 0.004


def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
    """Builds the network; its variables and arithmetic have the dtype of the images.

    Adds each layer's activations to the collection "activations", for summaries.

    Args:
      images: floating point [batch, 24, 24, 3]; the batch may be statically unknown.
      training: not used: no layer behaves differently in training.

    Returns:
      Logits [batch, 10].
    """
    del training
    with tf.compat.v1.variable_scope("conv1"):
        conv1 = _observed(_convolution(images, 64, stddev=5e-2, bias=0.0), "conv1")
    pool1 = tf.nn.max_pool2d(conv1, 3, 2, "SAME", name="pool1")
    norm1 = normalization.local_response_normalization(pool1)
    with tf.compat.v1.variable_scope("conv2"):
        conv2 = _observed(_convolution(norm1, 64, stddev=5e-2, bias=0.1), "conv2")
    norm2 = normalization.local_response_normalization(conv2)
    pool2 = tf.nn.max_pool2d(norm2, 3, 2, "SAME", name="pool2")
    height, width, channels = pool2.shape[1:]
    flat = tf.reshape(pool2, [-1, height * width * channels])
    with tf.compat.v1.variable_scope("local3"):
        local3 = _observed(tf.nn.relu(_affine(flat, 384, 0.04, 0.1, WEIGHT_DECAY)), "local3")
    with tf.compat.v1.variable_scope("local4"):
        local4 = _observed(tf.nn.relu(_affine(local3, 192, 0.04, 0.1, WEIGHT_DECAY)), "local4")
    with tf.compat.v1.variable_scope("softmax_linear"):
        return _observed(_affine(local4, NUM_CLASSES, 1 / 192, 0.0), "softmax_linear")


def _convolution(inputs, filters, stddev, bias):
    """Rectified 5 x 5 convolution with bias."""
    weights = _weights([5, 5, inputs.shape[-1], filters], inputs.dtype, stddev)
    maps = tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")
    return tf.nn.relu(tf.nn.bias_add(maps, _biases(filters, inputs.dtype, bias)))


def _affine(inputs, units, stddev, bias, decay=0.0):
    """Fully connected layer with bias and no activation function."""
    weights = _weights([inputs.shape[-1], units], inputs.dtype, stddev, decay)
    return tf.nn.bias_add(tf.matmul(inputs, weights), _biases(units, inputs.dtype, bias))


def _weights(shape, dtype, stddev, decay=0.0):
    """A variable that starts truncated normal, as a function of the graph's seed and of its own name only."""
    name = f"{tf.compat.v1.get_variable_scope().name}/weights"
    initializer = tf.compat.v1.truncated_normal_initializer(stddev=stddev, seed=zlib.crc32(name.encode()))
    regularizer = (lambda weights: decay * tf.nn.l2_loss(weights)) if decay else None
    return tf.compat.v1.get_variable("weights", shape, dtype, initializer, regularizer)


def _biases(size, dtype, value):
    return tf.compat.v1.get_variable("biases", [size], dtype, tf.compat.v1.constant_initializer(value))


def _observed(activations, layer):
    activations = tf.identity(activations, name=layer)
    tf.compat.v1.add_to_collection("activations", activations)
    return activations
