"""Examples with a number, a category and a weight, and canned estimators that are trained on them."""

import numpy as np
import tensorflow as tf

from tower_train import estimator as tf_estimator

COUNT, BATCH = 48, 4
KINDS = ["p", "q", "r"]
rng = np.random.default_rng(0)
NUMBER = rng.normal(size=COUNT).astype(np.float32)
KIND = rng.integers(0, 3, COUNT)
WEIGHT = rng.integers(1, 4, COUNT).astype(np.float32)
X = {"number": NUMBER, "kind": np.array(KINDS)[KIND], "weight": WEIGHT}
CLASS = (NUMBER + KIND > 1).astype(np.int64)
CLASS3 = np.digitize(NUMBER, [-0.5, 0.5])
TARGET = (2 * NUMBER - KIND + 0.1 * rng.normal(size=COUNT)).astype(np.float32)
DENSE = np.c_[np.eye(3)[KIND], NUMBER]  # columns in the order of their names, as the models have them

number = tf.feature_column.numeric_column("number")
kind = tf.feature_column.categorical_column_with_vocabulary_list("kind", KINDS)
one_hot = tf.feature_column.indicator_column(kind)


def input_fn(labels, epochs=None, batch=BATCH):
    return tf_estimator.inputs.numpy_input_fn(X, labels, batch, epochs, shuffle=False)


def batches(steps, towers):
    """Over steps, the rows of the batches of all towers."""
    rows = BATCH * towers
    return [np.arange(step * rows, (step + 1) * rows) % COUNT for step in range(steps)]


def config(towers=1, **settings):
    return tf_estimator.RunConfig(num_gpus=towers, tf_random_seed=1, **settings)
