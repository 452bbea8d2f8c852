"""A step over all workers: each gets the results of all towers, and the mean of their gradients."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.replicas import Replica
from tower_train.fronts.workers import Workers
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables

_EXAMPLES = "the number of its examples"
_HEAD = 16  # numbers of each example's label that tell it from others


def join(workers: Workers, kind: str, towers: list[Replica], labels):
    """Fills in the results of the other workers' towers, and gathers the labels that go with them.

    Outputs and labels of each worker's examples are exchanged, so that all workers compute one loss and the metrics on
    all of them, as one device does.

    Args:
      workers: this worker and the others.
      kind: the kind of step; it must be the same in all workers.
      towers: of all workers; those of others without results.
      labels: a structure of dense tensors [batch, ...] or None, such as labels and weights of the examples. Each worker
        contributes those of its own examples.

    Returns:
      The towers, and the labels.
    """
    own = [tower for tower in towers if tower.is_here]
    first = towers.index(own[0])
    with tf.device(HOST):
        begin, end = sum(t.size for t in towers[:first]), sum(t.size for t in towers[: first + len(own)])
        whole = [_dense(leaf) for leaf in keras.tree.flatten(labels) if leaf is not None]
        rows = [leaf[begin:end] for leaf in whole]
        results = _Results(own)
        batch = sum(tower.size for tower in towers)
        gathered = _gather(workers, kind, batch, [_heads(leaf) for leaf in whole], [*rows, *results.tensors])
        for tensor, whole in zip(rows + results.rows, gathered, strict=False):
            whole.set_shape([None, *tensor.shape[1:]])
        of_labels = iter(gathered[: len(rows)])
        labels = keras.tree.map_structure(lambda leaf: None if leaf is None else next(of_labels), labels)
        return results.fill(towers, gathered[len(rows) :]), labels


def begin(workers: Workers, kind: str, batch: tf.Tensor) -> None:
    """Makes sure that all workers begin a step of one kind, on equally many examples."""

    def exchange(examples):
        workers.gather(workers.next_batch(kind), **{_EXAMPLES: int(examples)})
        return [examples]

    exchanged(exchange, [tf.convert_to_tensor(batch)])


def average(workers: Workers, mean_grads: GradientsAndVariables) -> GradientsAndVariables:
    """Returns the mean over workers of their towers' mean gradients; IndexedSlices stay sparse."""
    grads = [grad for grad, _ in mean_grads]
    sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
    dense = [grad for grad, is_sparse in zip(grads, sparse, strict=True) if not is_sparse]
    slices = [grad for grad, is_sparse in zip(grads, sparse, strict=True) if is_sparse]

    def exchange(*arrays):
        means = workers.mean(arrays[: len(dense)]) if dense else []
        parts = workers.gather("gradients", arrays[len(dense) :]) if slices else []
        return [*means, *map(np.concatenate, zip(*parts, strict=True))]

    with tf.device(HOST):
        found = exchanged(exchange, [*dense, *(part for grad in slices for part in (grad.values, grad.indices))])
        for grad, mean in zip(dense, found, strict=False):
            mean.set_shape(grad.shape)
        dense_means, parts = iter(found[: len(dense)]), iter(found[len(dense) :])
        means = []
        for grad, variable in mean_grads:
            if isinstance(grad, tf.IndexedSlices):
                values, indices = next(parts), next(parts)
                values.set_shape([None, *grad.values.shape[1:]])
                indices.set_shape([None])
                means.append((tf.IndexedSlices(values / workers.size, indices, grad.dense_shape), variable))
            else:
                means.append((next(dense_means), variable))
        return means


class _Results:
    """The results of a worker's towers as tensors to be sent: rows of examples, then a row for each tower."""

    def __init__(self, own: list[Replica]):
        self._own, self._first = own, own[0]
        outputs = [keras.tree.flatten(tower.outputs) for tower in own]
        masks = [[compat.mask_of(output) for output in outputs_of] for outputs_of in outputs]
        self._is_masked = [mask is not None for mask in masks[0]]
        self.rows = [tf.concat(parts, axis=0) for parts in zip(*outputs, strict=True)]
        self.rows += [tf.concat(parts, axis=0) for parts in zip(*masks, strict=True) if parts[0] is not None]
        self._added = [tf.stack(losses) for losses in zip(*(tower.added_losses for tower in own), strict=True)]
        self._assigned = [tf.stack([tower.assigned[i] for tower in own]) for i in self._first.assigned]
        self.tensors = [*self.rows, *self._added, *self._assigned]

    def fill(self, towers: list[Replica], gathered: list[tf.Tensor]) -> list[Replica]:
        """Returns all towers, with the results of other workers' towers from the gathered `tensors`."""
        for own, whole in zip(self._added + self._assigned, gathered[len(self.rows) :], strict=True):
            whole.set_shape([len(towers), *own.shape[1:]])
        filled, begin = [], 0
        for i, tower in enumerate(towers):
            end = begin + tower.size
            if not tower.is_here:
                rows = [whole[begin:end] for whole in gathered[: len(self.rows)]]
                tower = self._of(tower, rows, [whole[i] for whole in gathered[len(self.rows) :]])
            filled.append(tower)
            begin = end
        return filled

    def _of(self, tower: Replica, rows: list[tf.Tensor], scalars: list[tf.Tensor]) -> Replica:
        count = len(self._is_masked)
        masks = iter(rows[count:])
        for output, is_masked in zip(rows, self._is_masked, strict=False):
            if is_masked:
                compat.set_mask(output, next(masks))
        return dataclasses.replace(
            tower,
            outputs=keras.tree.pack_sequence_as(self._first.outputs, rows[:count]),
            added_losses=scalars[: len(self._added)],
            assigned=dict(zip(self._first.assigned, scalars[len(self._added) :], strict=True)),
        )


def _gather(workers: Workers, kind: str, batch, heads: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list:
    """Returns over tensors the workers' rows joined in their order, where they have the same whole batch, by its size
    and the heads of its labels."""

    def exchange(examples, *arrays):
        name = workers.next_batch(kind)
        digest = np.array(zlib.crc32(b"".join(head.tobytes() for head in arrays[: len(heads)])))
        parts = workers.gather(name, [digest, *arrays[len(heads) :]], **{_EXAMPLES: int(examples)})
        workers.check_order(name, [int(part[0]) for part in parts])
        return [np.concatenate(each) for each in list(zip(*parts, strict=True))[1:]]

    return exchanged(exchange, tensors, batch, *heads)


def _heads(leaf: tf.Tensor) -> tf.Tensor:
    """The first numbers of each example."""
    return leaf if leaf.shape.rank < 2 else tf.reshape(leaf, [tf.shape(leaf)[0], -1])[:, :_HEAD]


def exchanged(exchange: Callable, tensors: Sequence[tf.Tensor], *more: tf.Tensor) -> list[tf.Tensor]:
    """Calls a function of arrays in a step.

    Args:
      exchange: gets the values of `more` and of `tensors`; returns an array for each of `tensors`.
      tensors: whose dtypes the results have.
      more: further arguments, before those.
    """

    def run(*arrays):
        try:
            return exchange(*arrays)
        except errors.UserError as error:  # which `workers` keeps; TensorFlow logs an error with all that led to it
            raise RuntimeError(str(error)) from None

    found = tf.numpy_function(run, [*more, *tensors], [tensor.dtype for tensor in tensors])
    return found if isinstance(found, list) else [found]  # the only one, of a step that runs eagerly


def _dense(leaf) -> tf.Tensor:
    leaf = tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf  # of train_on_batch, eagerly
    if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.string:
        raise errors.ConfigError(
            f"fit got labels of the kind {getattr(leaf, 'dtype', None) or type(leaf).__name__}, which workers cannot "
            "send to each other. Give labels and weights as dense tensors of numbers."
        )
    return leaf
