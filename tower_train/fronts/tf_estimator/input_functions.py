"""Input functions of arrays and of pandas data frames: the library's tf.estimator.inputs, with data sets for queues.

Each tower takes the next batch of a data set; of a queue's tensors all would get the same one.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


def numpy_input_fn(
    x, y=None, batch_size=128, num_epochs=1, shuffle=None, queue_capacity=1000, num_threads=1
) -> Callable:
    """Returns an input_fn whose batches are rows of arrays; arguments and errors are the library's.

    Batches go on over the ends of epochs; only the very last one may be smaller. Shuffling draws each epoch in another
    order of all rows. queue_capacity and num_threads have no effect. An Estimator gets a tf.data.Dataset of features or
    of (features, labels); a call in a graph returns the tensors of one iterator, as in 1.15.
    """
    with tf.Graph().as_default():
        library.numpy_io.numpy_input_fn(x, y, batch_size, num_epochs, shuffle)()  # raises its errors
    return _input_fn(x if y is None else (x, y), batch_size, num_epochs, shuffle)


def pandas_input_fn(
    x, y=None, batch_size=128, num_epochs=1, shuffle=None, queue_capacity=1000, num_threads=1, target_column="target"
) -> Callable:
    """Returns an input_fn whose batches are rows of a pandas.DataFrame; its columns are the features.

    The labels y are a pandas.Series, or a DataFrame whose columns are the labels, both with the index of x.
    target_column names a Series of labels, which no column of x may do. All else is as for numpy_input_fn.
    """
    if y is not None and target_column in x.columns:
        raise ValueError(f"x has a column {target_column!r}. Give the labels another name, by target_column=.")
    if y is not None and not np.array_equal(x.index, y.index):
        raise ValueError("x and y must have the same index; they are matched row by row. Look at y.index.")
    features = {column: np.array(x[column]) for column in x.columns}
    labels = {column: np.array(y[column]) for column in y.columns} if hasattr(y, "columns") else y
    without_labels = numpy_input_fn(features, None, batch_size, num_epochs, shuffle)
    return without_labels if y is None else _input_fn((features, labels), batch_size, num_epochs, shuffle)


def _input_fn(arrays, batch_size: int, num_epochs: int | None, shuffle: bool) -> Callable:
    arrays = tf.nest.map_structure(np.asarray, arrays)
    [count] = {len(array) for array in tf.nest.flatten(arrays)}

    def input_fn(config=None):
        order = tf.data.Dataset.range(count)
        order = order.shuffle(count) if shuffle else order
        order = order.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
        # The arrays are one element, so that the shuffling does not copy them row by row.
        batches = tf.data.Dataset.zip((tf.data.Dataset.from_tensors(arrays).repeat(), order))
        batches = batches.map(lambda all_, at: tf.nest.map_structure(lambda array: tf.gather(array, at), all_))
        if config is not None or tf.executing_eagerly():  # an Estimator gives its config
            return batches.prefetch(1)
        return v1.data.make_one_shot_iterator(batches).get_next()

    return input_fn
