"""The network of the TensorFlow CIFAR-10 tutorial: two convolutions, two fully connected layers, a softmax layer."""

import tensorflow as tf

from cifar10.convolution import convolution
from cifar10.normalization import local_response_normalization
from tower_train import layers

NUM_CLASSES = 10
WEIGHT_DECAY = 0.004

v1 = tf.compat.v1


def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
    """Builds the network: images [batch, 24, 24, 3] to logits [batch, 10].

    Variables and arithmetic have the dtype of the images. The layers, their sizes, initial values and variable names
    are the tutorial's. Each layer's output joins the collection "activations", for summaries.
    """
    del training  # no layer behaves differently in it
    with v1.variable_scope("conv1"):
        # `convolution` would not pay here: its transforms of the 64 outputs cost more than the products with 3 inputs.
        maps = tf.nn.conv2d(images, _filters(images, 64), strides=1, padding="SAME")
        biases = layers.biases(maps)
        _observed(tf.nn.relu(tf.nn.bias_add(maps, biases)), "conv1")  # for summaries only, so a plain step skips it
    # Bias and relu never change which of two values is the greater, so they may as well follow the pooling, which
    # leaves them a quarter of the values.
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


def _filters(inputs, count):
    return layers.weights([5, 5, inputs.shape[-1], count], inputs.dtype, _normal(5e-2))


def _normal(deviation):
    return v1.truncated_normal_initializer(stddev=deviation)


def _max_pool(maps):
    return tf.nn.max_pool2d(maps, ksize=3, strides=2, padding="SAME")


def _observed(activations, layer):
    activations = tf.identity(activations, name=layer)
    v1.add_to_collection("activations", activations)
    return activations
