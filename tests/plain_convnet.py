"""The reference network of TensorFlow's own operations, to compare with."""

import tensorflow as tf


def activations(images, variables):
    """{layer: activations} by the tutorial's operations in the tutorial's order, differentiable by TensorFlow."""

    def convolution(maps, layer):
        sums = tf.nn.conv2d(maps, variables[f"{layer}/weights"], 1, "SAME")
        return tf.nn.relu(tf.nn.bias_add(sums, variables[f"{layer}/biases"]))

    def max_pool(maps):
        return tf.nn.max_pool2d(maps, 3, 2, "SAME")

    def normalization(maps):
        if maps.dtype == tf.float32:
            return tf.nn.lrn(maps, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
        squares = tf.pad(tf.square(maps), [(0, 0)] * 3 + [(4, 4)])
        energy = tf.add_n([squares[..., k : k + maps.shape[-1]] for k in range(9)])
        return maps * (1 + 0.001 / 9 * energy) ** -0.75

    def affine(rows, layer):
        return tf.matmul(rows, variables[f"{layer}/weights"]) + variables[f"{layer}/biases"]

    layers = {"conv1": convolution(images, "conv1")}
    layers["conv2"] = convolution(normalization(max_pool(layers["conv1"])), "conv2")
    flat = tf.reshape(max_pool(normalization(layers["conv2"])), [-1, 2304])
    layers["local3"] = tf.nn.relu(affine(flat, "local3"))
    layers["local4"] = tf.nn.relu(affine(layers["local3"], "local4"))
    layers["softmax_linear"] = affine(layers["local4"], "softmax_linear")
    return layers
