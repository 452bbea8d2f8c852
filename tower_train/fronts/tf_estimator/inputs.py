"""The batches of an input_fn's data set for several towers."""

import tensorflow as tf

from tower_train import errors
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
