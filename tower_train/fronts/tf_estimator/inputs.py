"""The batches of an input_fn's data set for several towers, and input functions of arrays and of pandas data frames."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.data.arrays import outside_graph
from tower_train.fronts.tf_estimator import library
from tower_train.graph.collectives import AllReduce

v1 = tf.compat.v1


class Batches(list):
    """The batches that each step takes of a data set: (features, labels) for each tower.

    Args:
      dataset: the input_fn's result; DataError if it is no data set.
      num_batches: batches that each session.run takes, the next ones of the data set in their order.
      all_reduce: between the workers, which end together.
    """

    def __init__(self, dataset: tf.data.Dataset, num_batches: int, all_reduce: AllReduce):
        self.ask_to_stop = None  # the op that ends the input of all workers; None for a process by itself
        iterator = v1.data.make_initializable_iterator(checked(dataset))
        self.hooks = [library.util._DatasetInitializerHook(iterator)]
        are_together, elements, before = all_reduce.num_workers > 1, [], []
        for _ in range(num_batches):
            with tf.control_dependencies(before):  # else towers would get their batches in any order
                elements.append(iterator.get_next_as_optional() if are_together else iterator.get_next())
            leaves = [elements[-1].has_value()] if are_together else tf.nest.flatten(elements[-1], True)
            before = [leaf for leaf in leaves if leaf is not None]
        if are_together:
            elements = self._ending_together(elements, all_reduce)
        super().__init__(map(library.util.parse_iterator_result, elements))

    def _ending_together(self, optionals: list[tf.experimental.Optional], all_reduce: AllReduce) -> list:
        """Returns the batches of a session.run, which ends in all workers as at the end of a data set if one lacks a
        batch or was asked to stop."""
        asked = v1.get_variable(
            "tower_train/asked_to_stop",
            [],
            tf.bool,
            v1.zeros_initializer(),
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )
        self.ask_to_stop = asked.assign(True, read_value=False)
        ready = tf.reduce_all([~asked.read_value(), *(optional.has_value() for optional in optionals)])
        [[share]] = all_reduce.mean([[tf.cast(ready, tf.float32)]])
        nothing = v1.data.make_initializable_iterator(tf.data.Dataset.range(0))
        self.hooks.append(library.util._DatasetInitializerHook(nothing))
        with tf.control_dependencies([tf.cond(share < 1, lambda: tf.group(nothing.get_next()), tf.no_op)]):
            return [optional.get_value() for optional in optionals]


def checked(dataset) -> tf.data.Dataset:
    """Returns what an input_fn returned; DataError if it is no data set."""
    if isinstance(dataset, tf.data.Dataset):
        return dataset
    raise errors.DataError(
        f"input_fn returned a {type(dataset).__name__}, of which each tower and worker would get the same. Return a "
        "tf.data.Dataset."
    )


def numpy_input_fn(
    x, y=None, batch_size=128, num_epochs=1, shuffle=None, queue_capacity=1000, num_threads=1
) -> Callable:
    """Returns an input_fn whose batches are rows of arrays; arguments and errors are the library's.

    It returns a tf.data.Dataset, from which each tower takes the next batch; a queue would give all the same
    one. Batches go on over the ends of epochs; only the very last one may be smaller. Shuffling draws each epoch in
    another order of all rows. queue_capacity and num_threads have no effect.
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

    def input_fn():
        order = tf.data.Dataset.range(count)
        order = order.shuffle(count) if shuffle else order
        order = order.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
        # The arrays are one element, so that the shuffling does not copy them row by row.
        whole = tf.data.Dataset.from_tensors(tf.nest.map_structure(outside_graph, arrays)).repeat()
        batches = tf.data.Dataset.zip((whole, order))
        batches = batches.map(lambda all_, at: tf.nest.map_structure(lambda array: tf.gather(array, at), all_))
        return batches.prefetch(1)

    return input_fn
