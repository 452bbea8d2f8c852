"""The one update of a copy of the variables: optimizer, lookahead, then moving averages; and the counters."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.graph import statistics
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.lookahead import Lookahead
from tower_train.layers import Learning, Statistic

v1 = tf.compat.v1
Groups = list[tuple[v1.train.Optimizer, GradientsAndVariables]]


def make_optimizer(name: str, learning_rate: tf.Tensor, momentum: float, nesterov: bool = False) -> v1.train.Optimizer:
    """TensorFlow's optimizer by its name on the command line: sgd, momentum, adam, or lars (see lars_gradients)."""
    return {
        "sgd": lambda: v1.train.GradientDescentOptimizer(learning_rate),
        "momentum": lambda: v1.train.MomentumOptimizer(learning_rate, momentum, use_nesterov=nesterov),
        "adam": lambda: v1.train.AdamOptimizer(learning_rate),
        "lars": lambda: v1.train.MomentumOptimizer(learning_rate, momentum),
    }[name]()


def optimizers(
    gradients: GradientsAndVariables,
    learning: Callable[[tf.Variable], Learning],
    make: Callable[[float, float], v1.train.Optimizer],
) -> Groups:
    """An optimizer for each group of variables that learn at the same rate.

    Args:
      gradients: what to apply.
      learning: variable -> how it is trained.
      make: (rate_factor, until_epoch) -> the optimizer of variables that are trained so.

    Returns:
      (optimizer, its share of the gradients). Those that no block of `layers.learning` is about come first, so that all
      that their optimizer creates is named as it is without such blocks.
    """
    groups = {(1.0, math.inf): []}
    for gradient, variable in gradients:
        _, *group = learning(variable)
        groups.setdefault(tuple(group), []).append((gradient, variable))
    return [(make(*group), members) for group, members in groups.items() if members or not gradients]


def clip_by_norm(gradients: GradientsAndVariables, limit: float) -> GradientsAndVariables:
    """All gradients times limit / norm, norm being that of all of them together, where it is greater than limit."""
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], limit)
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients, strict=True)]


def lars_gradients(gradients: GradientsAndVariables, trust: float = 0.001) -> GradientsAndVariables:
    """Each matrix's and each kernel's gradient times trust * norm of its weights / norm of its gradient.

    Applied with momentum this is LARS (You et al. 2017, "Large batch training of convolutional networks", algorithm 1)
    for a constant rate; the gradients hold the weight decay. Biases and scales (of rank 1) keep theirs.
    """

    def scaled(gradient, variable):
        if variable.shape.rank < 2:
            return gradient
        gradient = tf.convert_to_tensor(gradient)
        weight_norm, gradient_norm = tf.norm(variable), tf.norm(gradient)
        usual = tf.logical_and(weight_norm > 0, gradient_norm > 0)
        ratio = trust * weight_norm / tf.where(usual, gradient_norm, tf.ones_like(gradient_norm))
        return gradient * tf.where(usual, ratio, tf.ones_like(ratio))

    return [(scaled(gradient, variable), variable) for gradient, variable in gradients]


def moving_averages(decay: float, global_step: tf.Variable | None = None) -> tf.train.ExponentialMovingAverage | None:
    """The moving averages of the weights; None for decay 0.

    With global_step the decay starts low, min(decay, (1 + step) / (10 + step)), as in the original.
    """
    return tf.train.ExponentialMovingAverage(decay, global_step) if decay else None


def variables_to_restore(decay: float) -> dict[str, tf.Variable]:
    """{name in a checkpoint: variable of the default graph}, for using a trained network: trained weights and moving
    statistics begin as their moving averages of this decay; as what they are themselves for decay 0."""
    averages = moving_averages(decay)
    return averages.variables_to_restore() if averages else {v.op.name: v for v in v1.global_variables()}


def apply_update(
    groups: Groups,
    weights: Sequence[tf.Variable],
    averages: tf.train.ExponentialMovingAverage | None,
    moving: Sequence[Statistic] = (),
    lookahead: Lookahead | None = None,
) -> tf.Operation:
    """One step of one copy, in this order: the variables, the moving statistics, the lookahead of both, the moving
    averages of both.

    Args:
      groups: what to apply, and by what; from `optimizers`.
      weights: the trained variables, also those that have no gradient.
      averages: from `moving_averages`, or None.
      moving: from `statistics.average_statistics`.
      lookahead: or None.
    """
    followed = [*weights, *(statistic.moving for statistic in moving if statistic.followed)]
    updated = [optimizer.apply_gradients(gradients) for optimizer, gradients in groups]
    with tf.control_dependencies(updated):
        moved = statistics.update_moving(moving)
    if lookahead:
        with tf.control_dependencies([moved]):
            moved = lookahead.apply(followed)
    with tf.control_dependencies([moved]):
        return averages.apply(followed) if averages else tf.no_op()


def count_step(counts: Sequence[tuple[tf.Variable, int | tf.Tensor]]) -> tf.Operation:
    """Moves the counters on by one step."""
    return tf.group(*[counter.assign_add(amount) for counter, amount in counts])
