"""Input functions of arrays and of pandas data frames: the library's tf.estimator.inputs, with data sets for queues.

Each tower takes the next batch of a data set; of a queue's tensors all would get the same one.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1


def numpy_input_fn(
    x, y=None, batch_size=128, num_epochs=1, shuffle=None, queue_capacity=1000, num_threads=1
) -> Callable:
    """Returns an input_fn whose batches are rows of arrays.

    Batches go on over the ends of epochs; only the very last one may be smaller. Shuffling draws each epoch in another
    order of all rows.

    Args:
      x: an array, or {name: array [rows, ...]}.
      y: the labels: an array, or {name: array} with other names than x; None for none.
      batch_size: rows per batch.
      num_epochs: how often each row is drawn; None for endlessly.
      shuffle: True or False; required.
      queue_capacity, num_threads: accepted; there is no queue.

    Returns:
      A function that gives an Estimator a tf.data.Dataset of features or of (features, labels). Called by itself in a
        graph it returns the tensors of one iterator, as in 1.15.

    Raises:
      DataError: no arrays, no rows, or another number of them.
      ConfigError: shuffle is not given.
    """
    if not isinstance(x, (dict, np.ndarray)):
        raise errors.DataError(f"x must be an array or a dict of arrays; got a {type(x).__name__}.")
    if isinstance(x, dict) and isinstance(y, dict) and x.keys() & y.keys():
        raise errors.DataError(f"x and y have the same names: {sorted(x.keys() & y.keys())}. Rename those of y.")
    return _input_fn(x, y, batch_size, num_epochs, shuffle)


def pandas_input_fn(
    x, y=None, batch_size=128, num_epochs=1, shuffle=None, queue_capacity=1000, num_threads=1, target_column="target"
) -> Callable:
    """Returns an input_fn whose batches are rows of a pandas.DataFrame; its columns are the features.

    Args:
      x: a pandas.DataFrame.
      y: the labels: a pandas.Series, or a DataFrame whose columns are the labels, both with the index of x.
      target_column: a name for the labels, which no column of x may have.
      others: as for numpy_input_fn, whose result and errors are the same.
    """
    if not hasattr(x, "columns"):
        raise errors.DataError(
            f"x must be a pandas.DataFrame; got a {type(x).__name__}. Use numpy_input_fn for arrays."
        )
    if y is not None and target_column in x.columns:
        raise errors.DataError(f"x has a column {target_column!r}. Give the labels another name, by target_column=.")
    if y is not None and not (hasattr(y, "index") and np.array_equal(x.index, y.index)):
        raise errors.DataError("x and y must have the same index; they are matched row by row. Look at y.index.")
    features = {column: np.array(x[column]) for column in x.columns}
    labels = {column: np.array(y[column]) for column in y.columns} if hasattr(y, "columns") else y
    return _input_fn(features, labels, batch_size, num_epochs, shuffle)


def _array(name: str, values) -> np.ndarray:
    """Returns an array that TensorFlow accepts; else DataError."""
    array = np.asarray(values)
    if not array.ndim or not array.size:
        raise errors.DataError(f"{name} has the shape {list(array.shape)}; it must have rows.")
    others = {type(value).__name__ for value in array.flat} - {"str", "bytes"} if array.dtype.hasobject else ()
    if others:
        raise errors.DataError(
            f"{name} holds objects of type {', '.join(sorted(others))}; columns are numbers or strings. Fill what is "
            "missing, as with fillna('')."
        )
    return array


def _input_fn(x, y, batch_size: int, num_epochs: int | None, shuffle: bool) -> Callable:
    if not isinstance(shuffle, bool):
        raise errors.ConfigError(f"shuffle={shuffle!r}; give True, which is better for training, or False.")
    rows = []
    for name, values in (("x", x), ("y", y)):
        if isinstance(values, dict):
            if not values:
                raise errors.DataError(f"{name} is an empty dict; it must hold at least one array.")
            rows.append({key: _array(f"{name}[{key!r}]", values[key]) for key in values})
        elif values is not None:
            rows.append(_array(name, values))
    rows = tuple(rows) if len(rows) > 1 else rows[0]
    lengths = {len(array) for array in tf.nest.flatten(rows)}
    if len(lengths) > 1:
        raise errors.DataError(f"All arrays of x and y must have the same length; got lengths {sorted(lengths)}.")
    [count] = lengths

    def input_fn(config=None):
        order = tf.data.Dataset.range(count)
        order = order.shuffle(count) if shuffle else order
        order = order.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
        # The arrays are one element, which saves copies row by row.
        batches = tf.data.Dataset.zip((tf.data.Dataset.from_tensors(rows).repeat(), order))
        batches = batches.map(lambda all_, at: tf.nest.map_structure(lambda array: tf.gather(array, at), all_))
        if config is not None or tf.executing_eagerly():  # an Estimator gives its config
            return batches.prefetch(1)
        return v1.data.make_one_shot_iterator(batches).get_next()

    return input_fn
