"""Workloads of a user's own: arrays in memory, random noise on every example, a network of two layers; and others."""

import dataclasses
import math
import time

import numpy as np
import tensorflow as tf

from tower_train import Examples, Workload, mean_squared_error, regression_metrics

CLASSES = ("one", "two", "three")
SLOW_SECS = 0.1


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


def poisoned(first, end, value=math.nan):
    """The workload, but that the examples at positions first to end - 1 have features that are not finite."""

    def spoil(features, draws):
        bad = (draws.positions >= first) & (draws.positions < end)
        return tf.where(bad[:, tf.newaxis], value, add_noise(features, draws))

    return dataclasses.replace(WORKLOAD, augment=spoil)


def slowly(features, draws=None):
    later = tf.numpy_function(lambda x: time.sleep(SLOW_SECS) or x, [features], features.dtype)
    return tf.ensure_shape(later, features.shape)


SLOW = dataclasses.replace(  # its input takes SLOW_SECS a step
    WORKLOAD, examples=lambda request: dataclasses.replace(load(request), parallel_steps=1), augment=slowly
)


def load_sine(request):
    x = np.random.default_rng(len(request.split)).uniform(-3, 3, [512, 1]).astype(np.float32)
    return Examples.from_arrays(f"sine {request.split}", x, np.sin(x)[:, 0])


SINE = Workload(  # a regression: labels are numbers, and there are no classes
    "sine",
    load_sine,
    lambda x, training: layer("out", tf.nn.tanh(layer("hidden", x, 24)), 1),
    loss=mean_squared_error,
    metrics=regression_metrics,
    recipe={"optimizer": "adam", "learning_rate": 0.01, "batch_size": 32, "ema": 0.9},
)
