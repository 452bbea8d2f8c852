"""Keras variables as variables of a graph: their initial values."""

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat


def constant(value: np.ndarray):
    """Returns an initializer whose value stays out of the graph, which is written to disk with each checkpoint."""

    def initializer(shape, dtype=None, partition_info=None):
        return tf.ensure_shape(outside_graph(value), shape)

    return initializer


def initializer_of(variable: keras.Variable, assigned: tf.Tensor | None):
    """Returns an initializer for get_variable.

    Args:
      variable: without a value, if its model was built in a StatelessScope.
      assigned: its value in that scope, such as a loaded weight; None if it has none there.
    """
    initializer = compat.pending_initializer(variable)
    if assigned is None and initializer is None:  # the model was built elsewhere
        assigned = variable.value
    if assigned is not None:
        return constant(np.asarray(assigned))
    return _SeededLater(None if compat.is_seed_state(variable) else initializer)


class _SeededLater:
    """A Keras initializer, or None for the state of a layer's random numbers, that gets its seed from get_variable (see
    graph/towers.py), unless it has one."""

    seed = None

    def __init__(self, initializer):
        self._initializer = initializer

    def __call__(self, shape, dtype=None, partition_info=None):
        if self._initializer is None:
            return tf.constant([self.seed or 0, 0], dtype)
        get_config = getattr(self._initializer, "get_config", dict)
        if "seed" in get_config() and get_config()["seed"] is None:
            return type(self._initializer).from_config(get_config() | {"seed": self.seed})(shape, dtype)
        return self._initializer(shape, dtype=dtype)


def outside_graph(array: np.ndarray) -> tf.Tensor:
    """Returns an array as a tensor outside of the graph, which is limited to 2 GiB and written to disk."""
    tensor = tf.numpy_function(lambda: array, [], tf.as_dtype(array.dtype), stateful=False)
    return tf.ensure_shape(tensor, array.shape)
