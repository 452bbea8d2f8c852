"""A workload of a user's own: arrays in memory, random noise on every example, a network of two layers."""

import numpy as np
import tensorflow as tf

from tower_train import Examples, Workload

CLASSES = ("one", "two", "three")


def load(request):
    """96 training examples and 50 test examples, float32 [n, 4] about their class's number; no labels are rare."""
    rng = np.random.default_rng(len(request.split))
    labels = np.arange({"train": 96, "test": 50}[request.split]) % len(CLASSES)
    features = rng.normal(labels[:, np.newaxis], 1.0, [len(labels), 4])
    return Examples.from_arrays(f"toy {request.split}", features.astype(np.float32), labels, CLASSES)


def add_noise(features, draws):
    return features + 0.1 * draws.uniform("noise", 4)


def network(features, training):
    hidden = tf.nn.relu(layer("hidden", features, 8))
    return layer("softmax_linear", hidden, len(CLASSES))


def decay(weights):
    return 1e-3 * tf.nn.l2_loss(weights)


def layer(name, inputs, units):
    with tf.compat.v1.variable_scope(name):
        weights = tf.compat.v1.get_variable("weights", [inputs.shape[-1], units], inputs.dtype, regularizer=decay)
        biases = tf.compat.v1.get_variable("biases", [units], inputs.dtype, tf.compat.v1.zeros_initializer())
    return inputs @ weights + biases


WORKLOAD = Workload("toy", load, network, augment=add_noise)
