"""A workload with batch normalisation, dropout, weight decay and a sparse gradient, of an embedding; 60 examples."""

import time

import numpy as np
import tensorflow as tf

from tower_train import Examples, Workload, layers

v1 = tf.compat.v1


def load(request):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(1, 2, [60, 4]), rng.integers(3, size=60).astype(np.int32)
    return Examples.from_arrays("norm", features, labels, ("a", "b", "c"))


def network(features, training):
    kernel = v1.get_variable("kernel", [4, 6], features.dtype, regularizer=lambda w: 1e-2 * tf.nn.l2_loss(w))
    hidden = tf.nn.relu(layers.batch_normalization(features @ kernel, training, name="norm"))
    table = v1.get_variable("table", [5, 6], features.dtype)
    rows = tf.nn.embedding_lookup(table, tf.cast(tf.abs(features[:, 0]), tf.int64) % 5)
    return layers.dropout(hidden + rows, 0.3, training) @ v1.get_variable("softmax", [6, 3], features.dtype)


def stuck(features, draws):
    """The features, but for the batch that begins with position 44, which never comes."""
    found = tf.numpy_function(
        lambda x, first: time.sleep(600 * (first == 44)) or x, [features, draws.positions[0]], features.dtype
    )
    return tf.ensure_shape(found, features.shape)


WORKLOAD = Workload("norm", load, network)
STUCK = Workload("norm", load, network, augment=stuck)
