"""The gradient of the whole batch's loss, from the losses of towers, including those through joined tensors."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.exchange import Kind
from tower_train.fronts.lockstep.merges import Meeting
from tower_train.fronts.lockstep.requests import Loss
from tower_train.graph import gradients
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables


def batch_gradients(meeting: Meeting, losses: Sequence[Loss]) -> GradientsAndVariables:
    """Computes the gradient of the whole batch's loss: the mean of the towers' losses, weighted by their examples.

    A tower's loss depends on the others' weights through joined tensors: the sum over towers of the gradients by a
    joined tensor goes back, row by row, to the towers of its rows.

    Args:
      meeting: the towers, in the phase in which the losses were computed.
      losses: over towers, with variables and an optimizer, by whose scale the gradient is multiplied.

    Raises:
      ConfigError: no loss depends on any of the variables.
    """
    towers, variables = meeting.towers, losses[0].variables
    scale = losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
    shares = _shares(meeting, losses)
    rows, of_rows = [[] for _ in towers], [[] for _ in towers]  # over towers: of joined tensors, and gradients by them
    for k in reversed(range(len(towers[0].joins))):
        local, copies = zip(*(tower.joins[k] for tower in towers), strict=True)
        grads = []
        for i, tower in enumerate(towers):
            # Weighted afterwards: so it overflows and is rounded where the gradient of one device is.
            of_loss = [_times(grad, shares[i]) for grad in tower.gradients([losses[i].value], [scale], copies[i])]
            of_later = tower.gradients(rows[i], of_rows[i], copies[i]) if rows[i] else [None] * len(of_loss)
            grads.append([_sum(pair) for pair in zip(of_loss, of_later, strict=True)])
        with tf.device(meeting.device):
            sums = [_sum(of_towers) for of_towers in zip(*grads, strict=True)]
            reached = [i for i, total in enumerate(sums) if total is not None]
            parts = [[each[i] for each in local] for i in reached]
            for of_towers, cut in zip(parts, _cut(meeting, parts, [sums[i] for i in reached]), strict=True):
                for i, (part, grad) in enumerate(zip(of_towers, cut, strict=True)):
                    rows[i].append(part)
                    of_rows[i].append(grad)
    by_tower = [
        tower.weight_gradients(
            [loss.value, *rows[i]], [scale * tf.cast(shares[i], scale.dtype), *of_rows[i]], variables
        )
        for i, (tower, loss) in enumerate(zip(towers, losses, strict=True))
    ]
    if all(grad is None for grads in by_tower for grad in grads):
        raise errors.ConfigError(
            f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
            "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
            "two losses in one list."
        )
    with tf.device(HOST):
        return _total(meeting, [list(zip(grads, variables, strict=True)) for grads in by_tower])


def _shares(meeting: Meeting, losses: Sequence[Loss]) -> list[tf.Tensor]:
    """Returns the towers' parts of the whole batch's loss."""
    there, total = [tower.part.examples for tower in meeting.towers], meeting.towers[0].part.total
    if losses[0].examples is not None and not meeting.is_alone:
        counted = [tf.cast(loss.examples, total.dtype) for loss in losses]
        there = [tf.where(examples > 0, each, 0) for examples, each in zip(there, counted, strict=True)]
        [total] = meeting.exchange([(Kind.SUM, tf.add_n(there))])
    return [tf.math.divide_no_nan(each, total) for each in there]


def _times(grad, share: tf.Tensor):
    return None if grad is None else tf.convert_to_tensor(grad) * tf.cast(share, grad.dtype)


def _sum(grads: Sequence):
    """Adds gradients, those of float16 as if without rounding in between; None if there are none."""
    there = [grad for grad in grads if grad is not None]
    if len(there) < 2 or there[0].dtype != tf.float16:
        return tf.add_n(there) if there else None
    return tf.cast(tf.add_n([tf.cast(grad, tf.float32) for grad in there]), tf.float16)


def _cut(meeting: Meeting, rows: Sequence[Sequence[tf.Tensor]], sums: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Cuts gradients by joined tensors into those by the towers' rows of them.

    Args:
      meeting: of the towers.
      rows: over joined tensors, over towers.
      sums: over joined tensors, the sums of these towers' gradients by them.

    Returns:
      The gradients, ordered like `rows`.
    """
    counts = [[tf.shape(each)[0] for each in meeting.rows(of_towers)] for of_towers in rows]
    before = meeting.exchange([(Kind.BEFORE, tf.add_n(count)) for count in counts])
    wholes = meeting.exchange([(Kind.SUM, grad) for grad in sums])
    return [_cut_one(*each) for each in zip(rows, counts, before, wholes, strict=True)]


def _cut_one(rows: Sequence[tf.Tensor], counts: Sequence, begin: tf.Tensor, whole: tf.Tensor) -> list[tf.Tensor]:
    """Cuts one gradient: the towers' rows, and how many of them are in the whole, from a place on."""
    cut = []
    for part, size in zip(rows, counts, strict=True):
        missing = tf.zeros(tf.concat([[tf.shape(part)[0] - size], tf.shape(part)[1:]], 0), whole.dtype)
        cut.append(tf.concat([whole[begin : begin + size], missing], axis=0))
        begin += size
    return cut


def _total(meeting: Meeting, tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the sums over the towers of all processes; the rows of IndexedSlices are gathered."""
    means = gradients.average_gradients(tower_grads)  # names variables without gradients
    if meeting.is_alone:
        return means
    sums = [_scaled(grad, len(tower_grads)) for grad, _ in means]
    wholes = iter(meeting.exchange([sent for grad in sums for sent in _sent(grad)]))
    in_float16, total = _computed_in_float16(meeting.model), []
    for grad, (_, variable) in zip(sums, means, strict=True):
        if isinstance(grad, tf.IndexedSlices):
            whole = tf.IndexedSlices(next(wholes), next(wholes), grad.dense_shape)
        else:
            whole = next(wholes)
            if id(variable) in in_float16:  # one device sums in float16, where the sum may overflow
                whole = tf.cast(tf.cast(whole, tf.float16), grad.dtype)
        total.append((whole, variable))
    return total


def _scaled(grad, count: int):
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * count, grad.indices, grad.dense_shape)
    return grad * count


def _sent(grad) -> list[tuple[Kind, tf.Tensor]]:
    if isinstance(grad, tf.IndexedSlices):
        return [(Kind.ROWS, grad.values), (Kind.ROWS, grad.indices)]
    return [(Kind.SUM, grad)]


def _computed_in_float16(model: keras.Model) -> set[int]:
    """Returns the ids of weights whose innermost layer computes in float16."""
    dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(model) for v in layer.trainable_weights}
    return {key for key, dtype in dtypes.items() if dtype == "float16"}
