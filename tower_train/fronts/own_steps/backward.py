"""The gradients of the towers' losses, including those through joined tensors."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.own_steps import merges
from tower_train.fronts.own_steps.exchange import Exchange, Kind
from tower_train.fronts.own_steps.requests import Loss
from tower_train.fronts.own_steps.tower import Tower
from tower_train.graph.gradients import GradientsAndVariables


def tower_gradients(
    towers: Sequence[Tower], losses: Sequence[Loss], merge_device: str, exchange: Exchange
) -> list[GradientsAndVariables]:
    """Computes the towers' gradients, whose mean over towers is the gradient of the whole batch's loss.

    That loss is the mean of the towers' losses, weighted by their examples. A tower's loss depends on the others'
    weights through joined tensors: the sum over towers of the gradients by a joined tensor goes back, row by row, to
    the towers of its rows.

    Args:
      towers: of this process, in the phase in which the losses were computed.
      losses: over towers, with variables and an optimizer.
      merge_device: where tensors were joined.
      exchange: with other processes.

    Raises:
      ConfigError: no loss depends on any of the variables.
    """
    targets = [[loss.value] for loss in losses]
    of_targets = [[weight] for weight in _weights(towers, losses, exchange)]
    for k in reversed(range(len(towers[0].joins))):
        own, copies = zip(*(tower.joins[k] for tower in towers), strict=True)
        grads = [tower.gradients(targets[i], of_targets[i], copies[i]) for i, tower in enumerate(towers)]
        with tf.device(merge_device):
            reached = [i for i, each in enumerate(zip(*grads, strict=True)) if any(grad is not None for grad in each)]
            parts = [[each[i] for each in own] for i in reached]
            sums = [tf.add_n([tf.convert_to_tensor(g[i]) for g in grads if g[i] is not None]) for i in reached]
            for of_towers, cut in zip(parts, _cut(towers, parts, sums, exchange), strict=True):
                for i, (part, grad) in enumerate(zip(of_towers, cut, strict=True)):
                    targets[i].append(part)
                    of_targets[i].append(grad)
    variables = losses[0].variables
    found = [tower.weight_gradients(targets[i], of_targets[i], variables) for i, tower in enumerate(towers)]
    if all(grad is None for grads in found for grad in grads):
        raise errors.ConfigError(
            f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
            "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
            "two losses in one list."
        )
    return [list(zip(grads, variables, strict=True)) for grads in found]


def _weights(towers: Sequence[Tower], losses: Sequence[Loss], exchange: Exchange) -> list[tf.Tensor]:
    """The weights with which the mean of the towers' losses is the whole batch's, times the number of towers and the
    optimizer's loss scale."""
    one = losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
    count, total = towers[0].part.count, towers[0].part.total
    if count == 1:
        return [one]
    there = [tower.part.examples for tower in towers]
    if losses[0].examples is not None:
        given = [tf.cast(loss.examples, total.dtype) for loss in losses]
        there = [tf.where(own > 0, each, 0) for own, each in zip(there, given, strict=True)]
        [total] = exchange([(Kind.SUM, tf.add_n(there))])
    return [one * tf.cast(tf.math.divide_no_nan(count * each, total), one.dtype) for each in there]


def _cut(
    towers: Sequence[Tower], parts: Sequence[Sequence[tf.Tensor]], sums: Sequence[tf.Tensor], exchange: Exchange
) -> list[list[tf.Tensor]]:
    """Cuts gradients by joined tensors into those by the towers' parts of them.

    Args:
      towers: of this process.
      parts: over joined tensors, over towers.
      sums: over joined tensors, the sums of these towers' gradients by them.
      exchange: with other processes.

    Returns:
      The gradients, ordered like `parts`.
    """
    if towers[0].part.count == 1:
        return [[whole] for whole in sums]
    counts = [[tf.shape(part)[0] for part in merges.rows(towers, each)] for each in parts]
    own = [pair for count, grad in zip(counts, sums, strict=True)
           for pair in ((Kind.BEFORE, tf.add_n(count)), (Kind.SUM, grad))]  # fmt: skip
    found = iter(exchange(own))
    return [_cut_one(each, count, next(found), next(found)) for each, count in zip(parts, counts, strict=True)]


def _cut_one(parts: Sequence[tf.Tensor], counts: Sequence, begin: tf.Tensor, whole: tf.Tensor) -> list[tf.Tensor]:
    """Cuts one gradient: parts and their rows in the whole, over towers; the first one's place in the whole."""
    cut = []
    for part, size in zip(parts, counts, strict=True):
        missing = tf.zeros(tf.concat([[tf.shape(part)[0] - size], tf.shape(part)[1:]], 0), whole.dtype)
        cut.append(tf.concat([whole[begin : begin + size], missing], axis=0))
        begin += size
    return cut
