"""Means of gradients over workers, in a program's own graph, and counts of them."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph import collectives
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.collectives import Keys, Workers
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables, name_of

v1 = tf.compat.v1

_SUM_OF_HALVES = tf.float32  # for float16 and bfloat16 gradients, which are then rounded once
_COUNTS = "tower_train_counts"  # a table on each worker's host, which needs no initializer
ARRIVED, AVERAGED = 0, 1  # its columns


def average_over_workers(
    grads_and_vars: GradientsAndVariables, workers: Workers, dtype: tf.DType | None = None, densify: bool = False
) -> GradientsAndVariables:
    """Returns the mean over workers of each variable's gradient.

    Workers match gradients by the variables' names, whatever the order here. All are averaged in any step that uses
    one.

    Args:
      grads_and_vars: of this worker; gradients of their variables' shapes, IndexedSlices or None.
      workers: between which; the first device of each averages.
      dtype: in which dense gradients are sent; None for their own.
      densify: make IndexedSlices dense, which are gathered otherwise.

    Returns:
      The same list with means. IndexedSlices stay sparse, with the rows of all workers; None stays None.

    Raises:
      GraphError: outside of a graph; two variables of one name, or a gradient whose dtype cannot be averaged.
    """
    if tf.executing_eagerly():
        raise errors.GraphError(
            "Gradients are averaged over workers in a graph only. Build one: tf.Graph().as_default()"
        )
    names = [name_of(variable) for _, variable in grads_and_vars]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise errors.GraphError(f"{twice[0]} is the name of two variables, which workers tell apart by their names.")
    order = [i for i in sorted(range(len(names)), key=names.__getitem__) if grads_and_vars[i][0] is not None]
    if workers.size == 1 or not order:
        return list(grads_and_vars)
    keys = Keys.of(v1.get_default_graph())
    for name, (grad, variable) in zip(names, grads_and_vars, strict=True):
        keys.meaning[f"the gradient of {name}"] = _described(grad, variable, densify)
    with v1.name_scope("average_over_workers"), tf.device(workers.device):
        with tf.control_dependencies([keys.compared(workers)]):
            grads = [_of_shape(*grads_and_vars[i], densify) for i in order]
        chosen = [names[i] for i in order]
        count = _Count(keys.take(f"averaging {chosen}", 1 + len(grads)), grads)
        means = _means(grads, chosen, workers, dtype, count.key)
        means = count.after(means, workers.placed.towers[0])
    result = list(grads_and_vars)
    for i, mean in zip(order, means, strict=True):
        result[i] = mean, grads_and_vars[i][1]
    return result


def _means(grads: Sequence, names: Sequence[str], workers: Workers, dtype: tf.DType | None, key: int) -> list:
    keys, means = Keys.of(v1.get_default_graph()), list(grads)
    dense = [i for i, grad in enumerate(grads) if not isinstance(grad, tf.IndexedSlices)]
    if dense:
        device = workers.placed.towers[0]
        all_reduce = AllReduce([device], "collective", dtype, workers.size, key + 1)
        with tf.device(device):
            sent = [_widened(grads[i]) for i in dense]
        [found] = all_reduce.mean([sent])
        for i, mean in zip(dense, found, strict=True):
            means[i] = tf.cast(mean, grads[i].dtype)
    for i in set(range(len(grads))) - set(dense):
        values, indices = collectives.gather([grads[i].values, grads[i].indices], workers, keys.take(names[i], 3))
        means[i] = tf.IndexedSlices(values / workers.size, indices, grads[i].dense_shape)
    return means


class _Count:
    """Counts, for readers in another session, how often gradients and their means were computed."""

    def __init__(self, key: int, grads: Sequence):
        self.key = key
        with tf.control_dependencies([grad.op for grad in grads]):
            self._arrived = self._counted(ARRIVED)

    def after(self, means: Sequence, device: str) -> list:
        """Returns the means, once all of them have been counted."""
        with tf.control_dependencies([self._arrived, *(mean.op for mean in means)]):
            averaged = self._counted(AVERAGED)
        with tf.control_dependencies([averaged]), tf.device(device):
            return [
                tf.IndexedSlices(tf.identity(mean.values), mean.indices, mean.dense_shape)
                if isinstance(mean, tf.IndexedSlices)
                else tf.identity(mean)
                for mean in means
            ]

    def _counted(self, column: int) -> tf.Operation:
        with tf.device(HOST):
            table, place = _table(), tf.constant(2 * self.key + column, tf.int64)
            count = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=place, default_value=tf.constant(0, tf.int64))
            return tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=place, values=count + 1)


def _table() -> tf.Tensor:
    return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=_COUNTS)


def counts() -> tf.Tensor:
    """Returns int64 [2]: how often, on this worker's server, gradients and their means were computed so far."""
    with tf.device(HOST):
        places, values = tf.raw_ops.LookupTableExportV2(table_handle=_table(), Tkeys=tf.int64, Tvalues=tf.int64)
        return tf.math.unsorted_segment_sum(values, places % 2, 2)


def _of_shape(grad, variable, densify: bool):
    """Returns a gradient; dense ones have a static shape."""
    if isinstance(grad, tf.IndexedSlices) and not densify:
        return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    if not grad.dtype.is_floating:
        raise errors.GraphError(f"The gradient of {name_of(variable)} is {grad.dtype.name}, which has no mean.")
    return tf.ensure_shape(grad, variable.shape)


def _widened(grad: tf.Tensor) -> tf.Tensor:
    return tf.cast(grad, _SUM_OF_HALVES) if grad.dtype in (tf.float16, tf.bfloat16) else grad


def _described(grad, variable, densify: bool) -> str:
    if grad is None:
        return "none"
    rows = "rows of " if isinstance(grad, tf.IndexedSlices) and not densify else ""
    return rows + collectives.described(grad.dtype, variable.shape)
