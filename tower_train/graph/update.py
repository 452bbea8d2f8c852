"""The update of a copy of the variables: optimizer, then moving averages; and the counters."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.graph.context import ParamGroup, Statistic
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.optimizers import create_slots

v1 = tf.compat.v1

_AVERAGE = "ExponentialMovingAverage"  # the end of its name in a checkpoint


class Counters:
    """The counters of steps and of examples.

    Attributes:
      global_step: int64 variable, steps done.
      examples_seen: int64 variable, examples trained on.
    """

    def __init__(self, global_batch: int):
        """Creates the counters; a step adds global_batch examples."""
        self.global_step = v1.train.create_global_step()
        self.examples_seen = v1.get_variable("examples_seen", [], tf.int64, v1.zeros_initializer(), trainable=False)
        self._global_batch = global_batch

    def epochs_seen(self, num_examples: int) -> tf.Tensor:
        """Returns the epochs seen before this step; float64 scalar."""
        return tf.cast(self.examples_seen, tf.float64) / num_examples

    def count(
        self, others: Sequence[tuple[tf.Variable, tf.Tensor]] = (), after: Sequence[tf.Operation] = ()
    ) -> tf.Operation:
        """Counts one step. others: further (counter, amount); after: what must be done before."""
        amounts = [(self.global_step, 1), (self.examples_seen, self._global_batch), *others]
        with tf.control_dependencies(after):
            return tf.group(*[counter.assign_add(amount) for counter, amount in amounts])


def by_param_group(
    gradients: GradientsAndVariables, group_of: Callable[[tf.Variable], ParamGroup]
) -> dict[ParamGroup, GradientsAndVariables]:
    """Groups gradients by the rates of their variables; each group needs an optimizer of its own.

    The group outside of `layers.param_group` comes first, so that its optimizer's variables have the same names as
    without such blocks.
    """
    groups = {ParamGroup(): []}
    for gradient, variable in gradients:
        groups.setdefault(group_of(variable), []).append((gradient, variable))
    return {rate: members for rate, members in groups.items() if members or not gradients}


def limited(gradients: GradientsAndVariables, clip_norm: float, optimizer: str) -> GradientsAndVariables:
    """Scales all gradients by clip_norm / norm if their global norm is greater than that, 0 for no limit, and layer by
    layer for 'lars'."""
    if clip_norm:
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], clip_norm)
        gradients = [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients, strict=True)]
    return lars_gradients(gradients) if optimizer == "lars" else gradients


def lars_gradients(gradients: GradientsAndVariables, trust: float = 0.001) -> GradientsAndVariables:
    """Scales each matrix's and each kernel's gradient by trust * norm of its weights / norm of its gradient.

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


def prepare_update(
    groups: Sequence[tuple[v1.train.Optimizer, GradientsAndVariables]],
    weights: Sequence[tf.Variable],
    moving: Sequence[Statistic],
    average_decay: float,
    global_step: tf.Variable,
) -> Callable[[], tf.Operation]:
    """Creates the variables of a replica's update, outside of the conditional in which a step updates.

    Args:
      groups: over groups, the optimizer and the gradients that it applies.
      weights: the trained variables, also those that have no gradient.
      moving: the means of the batch statistics.
      average_decay: of the moving averages of weights and followed statistics; 0 for none.
      global_step: int64 variable, steps done before this one.

    Returns:
      A function that builds the update, in this order: the weights, the moving statistics, the averages of both.
    """
    averaged = [*weights, *(statistic.moving for statistic in moving if statistic.followed)]
    for optimizer, grads in groups:
        create_slots(optimizer, [variable for _, variable in grads])
    averages = [_create_average(variable) for variable in averaged] if average_decay else []

    def update() -> tf.Operation:
        with tf.control_dependencies([optimizer.apply_gradients(grads) for optimizer, grads in groups]):
            moved = tf.group(*[_move(statistic) for statistic in moving])
        with tf.control_dependencies([moved]):
            return _follow(averages, averaged, average_decay, global_step)

    return update


def _move(statistic: Statistic) -> tf.Tensor:
    """moving = momentum * moving + (1 - momentum) * value."""
    moving, value, momentum, _ = statistic
    return moving.assign_sub((1 - momentum) * (moving - value)) if momentum else moving.assign(value)


def _follow(
    averages: Sequence[tf.Variable], variables: Sequence[tf.Variable], decay: float, global_step: tf.Variable
) -> tf.Operation:
    """Updates moving averages.

    As tf.train.ExponentialMovingAverage.apply, whose conditionals take a tenth of what building a graph does:
    average -= (1 - d) * (average - variable), with d = min(decay, (1 + step) / (10 + step)) as in the original.
    """
    if not averages:
        return tf.no_op()
    with v1.name_scope(_AVERAGE):
        step = tf.cast(global_step, tf.float32)
        share = 1.0 - tf.minimum(tf.constant(decay), (1.0 + step) / (10.0 + step))
        shares = {dtype: tf.cast(share, dtype) for dtype in {average.dtype for average in averages}}
        return tf.group(*[
            average.assign_sub((average - variable) * shares[average.dtype], read_value=False)
            for average, variable in zip(averages, variables, strict=True)
        ])  # fmt: skip


def _create_average(variable: tf.Variable) -> tf.Variable:
    """Creates a variable's moving average, which begins as the variable: as what it is where it has been restored, else
    as its initial value."""
    with tf.device(variable.device):
        is_there = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        # Not tf.cond, which makes two functions of it.
        handle = tf.raw_ops.Switch(data=variable.handle, pred=is_there).output_true
        restored = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
        initial = tf.raw_ops.Switch(data=variable.initial_value, pred=is_there).output_false
        value = tf.ensure_shape(tf.raw_ops.Merge(inputs=[initial, restored]).output, variable.shape)
        return v1.get_variable(f"{variable.op.name}/{_AVERAGE}", initializer=value, trainable=False)


def variables_to_restore(decay: float) -> dict[str, tf.Variable]:
    """Returns {name in a checkpoint: variable of the default graph} for using a trained network: trained weights and
    moving statistics begin as their moving averages of this decay, or for decay 0 as they are."""
    if decay:
        return tf.train.ExponentialMovingAverage(decay, name=_AVERAGE).variables_to_restore()
    return {v.op.name: v for v in v1.global_variables()}
