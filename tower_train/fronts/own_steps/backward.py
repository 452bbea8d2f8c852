"""The gradients of the towers' losses, including those through joined tensors."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.own_steps import merges
from tower_train.fronts.own_steps.requests import Loss
from tower_train.fronts.own_steps.tower import Tower
from tower_train.graph.gradients import GradientsAndVariables


def tower_gradients(towers: Sequence[Tower], losses: Sequence[Loss], merge_device: str) -> list[GradientsAndVariables]:
    """Computes the towers' gradients, whose mean over towers is the gradient of the whole batch's loss.

    That loss is the mean of the towers' losses, weighted by their examples. A tower's loss depends on the others'
    weights through joined tensors: the sum over towers of the gradients by a joined tensor goes back, row by row, to
    the towers of its rows.

    Args:
      towers: in the phase in which the losses were computed.
      losses: over towers, with variables and an optimizer.
      merge_device: device of the joined tensors.

    Raises:
      ConfigError: no loss depends on any of the variables.
    """
    targets = [[loss.value] for loss in losses]
    of_targets = [[weight] for weight in _weights(towers, losses)]
    for k in reversed(range(len(towers[0].joins))):
        own, copies = zip(*(tower.joins[k] for tower in towers), strict=True)
        grads = [tower.gradients(targets[i], of_targets[i], copies[i]) for i, tower in enumerate(towers)]
        with tf.device(merge_device):
            for parts, of_copies in zip(zip(*own, strict=True), zip(*grads, strict=True), strict=True):
                reached = [tf.convert_to_tensor(grad) for grad in of_copies if grad is not None]
                if reached:
                    of_parts = _cut(towers, parts, tf.add_n(reached))
                    for i, (part, grad) in enumerate(zip(parts, of_parts, strict=True)):
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


def _weights(towers: Sequence[Tower], losses: Sequence[Loss]) -> list[tf.Tensor]:
    """Returns the weights with which the mean of the towers' losses is the whole batch's, times the number of towers
    and the optimizer's loss scale."""
    one = losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
    if len(towers) == 1:
        return [one]
    examples = [
        tower.part.examples if loss.examples is None else tf.cast(loss.examples, tower.part.examples.dtype)
        for tower, loss in zip(towers, losses, strict=True)
    ]
    there = [tf.where(tower.part.examples > 0, each, 0) for tower, each in zip(towers, examples, strict=True)]
    total = tf.add_n(there)
    return [one * tf.cast(tf.math.divide_no_nan(len(towers) * each, total), one.dtype) for each in there]


def _cut(towers: Sequence[Tower], parts: Sequence[tf.Tensor], whole: tf.Tensor) -> list[tf.Tensor]:
    """Cuts a gradient by a joined tensor into those by the towers' parts of it."""
    if len(towers) == 1:
        return [whole]
    cut, begin = [], 0
    for part, rows in zip(parts, merges.rows(towers, parts), strict=True):
        size = tf.shape(rows)[0]
        mine = whole[begin : begin + size]
        missing = tf.zeros(tf.concat([[tf.shape(part)[0] - size], tf.shape(part)[1:]], 0), whole.dtype)
        cut.append(tf.concat([mine, missing], axis=0))
        begin += size
    return cut
