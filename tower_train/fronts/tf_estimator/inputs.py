"""The batches of an input_fn's data set for several towers, and its arrays."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.keras_variables import outside_graph
from tower_train.fronts.tf_estimator import library
from tower_train.graph.collectives import AllReduce

v1 = tf.compat.v1
_LARGE_BYTES = 2**16


class Batches:
    """The batches that each step takes of a data set, one for each tower; iterates over them, (features, labels).

    Args:
      dataset: the input_fn's result.
      num_batches: batches that each session.run takes, the next ones of the data set in their order.
      all_reduce: between the workers, which end together.

    Attributes:
      hooks: start the data.
      arrivals: available once the batches are.
      ask_to_stop: the op that ends the input of all workers; None for a process by itself.

    Raises:
      DataError: it is no data set.
    """

    def __init__(self, dataset: tf.data.Dataset, num_batches: int, all_reduce: AllReduce):
        self._iterator = v1.data.make_initializable_iterator(checked(dataset))
        self.arrivals, self.ask_to_stop = [], None
        self.hooks = [library.util._DatasetInitializerHook(self._iterator)]
        if all_reduce.num_workers > 1:
            self._elements = self._take_together(num_batches, all_reduce)
        else:
            self._elements = [self._next() for _ in range(num_batches)]

    def __iter__(self) -> Iterator[tuple]:
        return map(library.util.parse_iterator_result, self._elements)

    def _next(self):
        with tf.control_dependencies(self.arrivals):  # else towers would get their batches in any order
            element = self._iterator.get_next()
        self.arrivals = [leaf for leaf in tf.nest.flatten(element, expand_composites=True) if leaf is not None]
        return element

    def _take_together(self, num_batches: int, all_reduce: AllReduce) -> list:
        """Takes the batches of a session.run, which ends in all workers as at the end of a data set if one lacks a
        batch or was asked to stop."""
        asked = v1.get_variable("tower_train/asked_to_stop", [], tf.bool, v1.zeros_initializer(), trainable=False,
                                collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
        self.ask_to_stop = asked.assign(True, read_value=False)
        optionals = []
        for _ in range(num_batches):
            with tf.control_dependencies(self.arrivals):
                optionals.append(self._iterator.get_next_as_optional())
            self.arrivals = [optionals[-1].has_value()]
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


@contextlib.contextmanager
def arrays_outside_the_graph() -> Iterator[None]:
    """Keeps large arrays of data sets out of the graph within this block: it is written to disk several times, and may
    not exceed 2 GiB."""

    def outside(leaf):
        is_large = isinstance(leaf, np.ndarray) and leaf.nbytes >= _LARGE_BYTES and not leaf.dtype.hasobject
        return outside_graph(leaf) if is_large else leaf

    def changed(make):
        return staticmethod(lambda tensors, name=None: make(tf.nest.map_structure(outside, tensors), name))

    with contextlib.ExitStack() as stack:
        for make in (tf.data.Dataset.from_tensor_slices, tf.data.Dataset.from_tensors):
            stack.enter_context(compat.replaced(tf.data.Dataset, make.__name__, changed(make)))
        yield
