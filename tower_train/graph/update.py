"""The update of a copy of the variables: weight decay, optimizer, then moving averages; and the counters."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tower_train.config import Config
from tower_train.graph.context import ParamGroup, Statistic
from tower_train.graph.gradients import all_finite, are_finite
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.optimizers import make_optimizer
from tower_train.graph.replica import Mean, Replica, built_towers

v1 = tf.compat.v1

AVERAGE = "ExponentialMovingAverage"  # the end of its name in a checkpoint
_NOT_DECAYED = re.compile(r"(bias|biases|beta|gamma|offset|scale)(_\d+)?")  # of any rank, such as attention's biases


class Counters:
    """The counters of steps and of examples."""

    def __init__(self, global_batch: int, num_examples: int):
        """Creates the counters; a step adds global_batch examples, of num_examples an epoch."""
        self.global_step = v1.train.create_global_step()  # int64 variable, steps done
        # int64 variable, examples trained on
        self.examples_seen = v1.get_variable("examples_seen", [], tf.int64, v1.zeros_initializer(), trainable=False)
        self.epochs_seen = tf.cast(self.examples_seen, tf.float64) / num_examples  # before this step
        self._global_batch = global_batch

    def count(
        self, others: Sequence[tuple[tf.Variable, tf.Tensor]] = (), after: Sequence[tf.Operation] = ()
    ) -> tf.Operation:
        """Counts one step. others: further (counter, amount); after: what must be done before."""
        amounts = [(self.global_step, 1), (self.examples_seen, self._global_batch), *others]
        with tf.control_dependencies(after):  # counters last: a step that is counted has happened
            return tf.group(*[counter.assign_add(amount) for counter, amount in amounts])


def update_if_finite(
    replicas: Sequence[Replica],
    mean: Mean,
    parts: Sequence[Callable[[], tf.Operation]],
    counters: Counters,
    scale: LossScale,
    skips: bool,
    when: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Updates all replicas and counts the step if the loss and all gradients are finite. If not, no variable of the
    network or of its optimizer changes.

    Sums carry NaN and Inf along, so it suffices to check what would be applied; towers are checked one by one only when
    that is not finite.

    Args:
      replicas, mean: with the towers' results, and their means.
      parts: functions that build parts of the update: each replica's, and that of hard examples.
      counters, scale: of the run.
      skips: whether a step that is not finite is counted, and in float16 lowers the loss scale; else it ends the run.
      when: the check's outcome, a bool scalar -> the same, once the next step's batches are in place.

    Returns:
      bool [towers + 1, 1 + gradients]: whether the tower's loss, then each of its gradients, is finite; the last row is
        of what would be applied, whose sums may overflow by themselves.
    """
    trained = {variable.ref() for _, variable in mean.gradients}
    # Mean has the first replica's variables, the originals, which towers' gradients are listed with too.
    towers = [
        [tower.loss, *(grad for grad, variable in tower.gradients if variable.ref() in trained)]
        for tower in built_towers(replicas)
    ]

    applicable = [mean.loss, *(grad for grad, _ in mean.gradients)]

    def applied() -> tf.Tensor:
        with tf.control_dependencies([counters.count(scale.after_update(), after=[build() for build in parts])]):
            return tf.ones([len(towers) + 1, len(towers[0])], tf.bool)

    def refused() -> tf.Tensor:
        with tf.control_dependencies([scale.without_update(mean.loss, counters.count, skips)]):
            return tf.stack([are_finite(values) for values in (*towers, applicable)])

    with tf.control_dependencies(mean.before_update):
        with v1.name_scope("check_finite"), replicas[0].here():
            is_applicable = all_finite(applicable)
        return tf.cond(when(is_applicable), applied, refused, name="train")


def prepare_update(
    replica: Replica, config: Config, rate: tf.Tensor, counters: Counters, param_groups: Mapping[str, ParamGroup]
) -> Callable[[], tf.Operation]:
    """Creates the variables of a replica's update, outside of the conditional in which a step updates.

    Args:
      replica: with its mean gradients.
      config: with the optimizer, and the decay of the moving averages, 0 for none.
      rate, counters: before this step.
      param_groups: {name of a variable in a block of layers.param_group: its group}.

    Returns:
      A function that builds the update: weight decay (Loshchilov and Hutter 2019, "Decoupled weight decay
        regularization", algorithm 2), the weights, the moving statistics, the averages of both.
    """
    groups = {ParamGroup(): []}  # first, so that its optimizer's variables are named as without such blocks
    for gradient, variable in replica.mean_grads:
        group = param_groups.get(replica.variables.canonical_name(variable), ParamGroup())
        groups.setdefault(group, []).append((gradient, variable))
    # the moving statistics lag with the weights, else averaged weights would meet newer ones
    averaged = [*replica.variables.trained(), *(each.moving for each in replica.moving if each.is_averaged)]
    with replica.variables.more_states():
        # over groups: (optimizer, decay or None, gradients)
        by_group = [
            (*make_optimizer(config, rate, counters.epochs_seen, group, grads), grads)
            for group, grads in groups.items()
            if grads
        ]
        for optimizer, _, grads in by_group:
            optimizer._create_slots([variable for _, variable in grads])  # else within the conditional
        averages = [_create_average(variable) for variable in averaged] if config.ema else []
    shares = _shares({average.dtype.base_dtype for average in averages}, config.ema, counters.global_step)

    trained = {variable.ref() for _, variable in replica.mean_grads}

    def update() -> tf.Operation:
        with replica.here("update"):
            # a layer that assigns a weight does so before the optimizer, like Keras' SpectralNormalization
            assigned = [_move(statistic) for statistic in replica.moving if statistic.moving.ref() in trained]
        with replica.here("update"), tf.control_dependencies(assigned):
            decayed = [
                variable.assign_sub(tf.cast(decay, variable.dtype) * variable, read_value=False)
                for _, decay, grads in by_group
                for _, variable in (grads if decay is not None else ())
                if is_decayed(variable)
            ]
            with tf.control_dependencies(decayed):  # decay first, of the weights before the step, as the paper has it
                applied = [optimizer.apply_gradients(grads) for optimizer, _, grads in by_group]
            moved = [_move(statistic) for statistic in replica.moving if statistic.moving.ref() not in trained]
            done = tf.group(*applied, *moved)
        # not in the same XLA cluster: it reads all variables before it writes any, and these need the new weights
        with replica.here("averages"), tf.control_dependencies([done]):
            return _follow(averages, averaged, shares)

    return update


def is_decayed(variable: tf.Variable) -> bool:
    """Returns whether --weight_decay is for a variable: not if it has fewer than two dimensions, or the name of a bias,
    or of a normalisation's scale or offset."""
    return variable.shape.rank > 1 and not _NOT_DECAYED.fullmatch(variable.op.name.rpartition("/")[2])


def _move(statistic: Statistic) -> tf.Operation:
    """moving = momentum * moving + (1 - momentum) * value."""
    moving, value, momentum, _ = statistic
    if not momentum:  # an assignment; also of integers, which cannot be mixed
        return moving.assign(value, read_value=False)
    return moving.assign_sub((1 - momentum) * (moving - value), read_value=False)


def _shares(dtypes: Iterable[tf.DType], decay: float, step: tf.Variable) -> dict[tf.DType, tf.Tensor]:
    """Returns {dtype: share by which a moving average follows}: 1 - min(decay, (1 + step) / (10 + step))."""

    def share(dtype: tf.DType) -> tf.Tensor:
        # float32 counts more steps than smaller types.
        wide = tf.float64 if dtype.real_dtype == tf.float64 else tf.float32
        steps = tf.cast(step, wide)
        return tf.cast(1.0 - tf.minimum(tf.constant(decay, wide), (1.0 + steps) / (10.0 + steps)), dtype)

    with v1.name_scope(AVERAGE):
        return {dtype: share(dtype) for dtype in dtypes}


def _follow(
    averages: Sequence[tf.Variable], variables: Sequence[tf.Variable], shares: Mapping[tf.DType, tf.Tensor]
) -> tf.Operation:
    """Updates moving averages like tf.train.ExponentialMovingAverage.apply, whose conditionals take a tenth of the time
    of building a graph."""
    if not averages:
        return tf.no_op()
    with v1.name_scope(AVERAGE):
        return tf.group(
            *[
                average.assign_sub((average - variable) * shares[average.dtype.base_dtype], read_value=False)
                for average, variable in zip(averages, variables, strict=True)
            ]
        )


def _create_average(variable: tf.Variable) -> tf.Variable:
    """Creates a variable's moving average, which begins at the variable's value if that was restored, else at its
    initial value."""
    with tf.device(variable.device):
        is_there = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        # Not tf.cond, which makes two functions of it.
        handle = tf.raw_ops.Switch(data=variable.handle, pred=is_there).output_true
        restored = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
        initial = tf.raw_ops.Switch(data=variable.initial_value, pred=is_there).output_false
        value = tf.ensure_shape(tf.raw_ops.Merge(inputs=[initial, restored]).output, variable.shape)
        name = f"{variable.op.name}/{AVERAGE}"
        return v1.get_variable(name, initializer=value, trainable=False)
