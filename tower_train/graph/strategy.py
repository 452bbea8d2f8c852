"""How the variables are kept and updated: once for all towers, or on each tower's device with the same means."""

from typing import NamedTuple

import tensorflow as tf

from tower_train import errors, layers
from tower_train.config import Config
from tower_train.graph import gradients, towers, update
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.devices import Devices
from tower_train.graph.lookahead import Lookahead
from tower_train.graph.mirrors import Copies

v1 = tf.compat.v1


def choose(config: Config, devices: Devices) -> tuple[Copies, AllReduce]:
    """Where the variables live, and what averages the gradients between those places."""
    if config.variable_update == "cpu":
        copies = Copies()
    else:
        copies = Copies(devices.towers, config.accumulate_steps)
    if len(copies) * devices.num_workers == 1:
        for name, given in (("check_mirrors_every_steps", config.check_mirrors_every_steps),
                            ("all_reduce_dtype", config.all_reduce_dtype != "same")):  # fmt: skip
            if given:
                raise errors.ConfigError(
                    f"--{name}={getattr(config, name)}: there is one copy of the variables. It is for several workers, "
                    "or for --variable_update=mirrored with several towers."
                )
    dtype = tf.bfloat16 if config.all_reduce_dtype == "bfloat16" else None
    return copies, AllReduce(copies.devices, config.all_reduce or "collective", dtype, devices.num_workers)


class Means(NamedTuple):
    """What one copy is updated with: the means over all towers.

    Attributes:
      loss: scalar, without weight decay.
      stopping: scalar, the mean over workers of what they said of stopping.
      gradients: of its variables.
      statistics: for its moving variables.
    """

    loss: tf.Tensor
    stopping: tf.Tensor
    gradients: gradients.GradientsAndVariables
    statistics: list[layers.Statistic]


def means(
    tower_losses: tf.Tensor, stopping: tf.Tensor, tower_grads: list, moving: list, copies: Copies, all_reduce: AllReduce
) -> list[Means]:
    """Over copies: first the mean over the towers that share the copy, then over the copies.

    Args:
      tower_losses: [towers].
      stopping: scalar, above 0 where this worker wants to stop.
      tower_grads: over towers, (gradient, original) of the trained variables.
      moving: over copies, from statistics.average_statistics.
    """
    losses, grads, trained = [], [], [variable for _, variable in tower_grads[0]]
    for i, device in enumerate(copies.devices):
        own = [tower for tower in range(len(tower_grads)) if copies.index(tower) == i]
        with tf.device(device):
            with v1.name_scope("average_losses"):
                losses.append(tf.reduce_mean(tower_losses[own[0] : own[-1] + 1]))
            grads.append([grad for grad, _ in gradients.average_gradients([tower_grads[tower] for tower in own])])
    grads = all_reduce.mean(grads)
    others = all_reduce.mean(
        [[loss, stopping, *(s.value for s in noted if s.is_mean)] for loss, noted in zip(losses, moving, strict=True)],
        exactly=True,
    )
    return [
        Means(
            loss,
            told,
            list(zip(grads[i], copies.of(i, trained), strict=True)),
            [statistic._replace(value=next(values)) if statistic.is_mean else statistic for statistic in moving[i]],
        )
        for i, (loss, told, values) in enumerate((other[0], other[1], iter(other[2:])) for other in others)
    ]


class Update:
    """The update of one copy.

    Attributes:
      loss: scalar, with weight decay.
      gradients: what it applies.
    """

    def __init__(self, config: Config, copies: Copies, index: int, means: Means, group_rate, global_step):
        """Args: the options; the copies, and which of them; what to update it with; (rate_factor, until_epoch) -> the
        rate of variables that are trained so; the step."""
        self._copies, self._index, self._means = copies, index, means
        with tf.device(copies.devices[index]):
            decay_loss, applied = gradients.add_weight_decay(means.gradients, copies.decays(index), means.loss.dtype)
            self.loss = means.loss + decay_loss
            if config.clip_gradients:
                applied = update.clip_by_norm(applied, config.clip_gradients)
            if config.optimizer == "lars":
                applied = update.lars_gradients(applied)
        self.gradients = applied
        dtype = towers.variable_dtype(tf.as_dtype(config.dtype))

        def make(*group):
            rate = tf.cast(group_rate(*group), dtype)
            return update.make_optimizer(config.optimizer, rate, config.momentum, config.nesterov)

        def learning(variable):
            return layers.learning_of(copies.original(variable).op.name)

        self._groups = update.optimizers(applied, learning, make)
        self._averages = update.moving_averages(config.moving_average_decay, global_step)

    def apply(self, lookahead: Lookahead | None) -> tf.Operation:
        """Makes the ops; to be called once, in the order of the copies."""
        self._copies.update(self._index)
        weights = self._copies.of(self._index, v1.trainable_variables())
        with tf.device(self._copies.devices[self._index]):
            return update.apply_update(self._groups, weights, self._averages, self._means.statistics, lookahead)
