"""The learning rate as a function of examples seen, so that it does not change with the number of towers."""

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from tower_train.config import Config
from tower_train.options import points


def learning_rate(config: Config, num_examples: int, examples_seen: tf.Tensor) -> tf.Tensor:
    """The rate of one step: the initial one, scaled to the global batch, times the schedule's factor, times warm-up.

    Args:
      config: the options whose names begin with learning_rate or lr, num_epochs_per_decay and warmup_epochs.
      num_examples: examples an epoch.
      examples_seen: int64 scalar, examples trained on before this step.

    Returns:
      float64 scalar.
    """
    if config.lr_schedule == "exponential":
        rate = exponential_decay(
            config.learning_rate, config.learning_rate_decay_factor, config.num_epochs_per_decay, num_examples,
            examples_seen,
        )  # fmt: skip
    elif config.lr_schedule == "piecewise":
        rate = piecewise_decay(
            config.learning_rate, config.learning_rate_decay_factor, config.lr_boundaries, num_examples, examples_seen
        )
    else:
        done = share_done(config, num_examples, examples_seen)
        if config.lr_schedule == "points":
            rate = config.learning_rate * interpolation(points.parse(config.lr_points, "lr_points"), done)
        else:
            rate = annealing(config.lr_schedule, config.learning_rate, done)
    scale = scaling(config.lr_scaling, config.global_batch, config.lr_base_batch)
    if not config.warmup_epochs:
        return rate * scale
    return rate * warmup(scale, config.warmup_epochs * num_examples, examples_seen)


def group_rate(
    rate: tf.Tensor, num_examples: int, examples_seen: tf.Tensor, rate_factor: float, until_epoch: float
) -> tf.Tensor:
    """The rate of variables from a block of tower_train.layers.learning.

    Args:
      rate: float64 scalar, from `learning_rate`.
      num_examples: examples an epoch.
      examples_seen: int64 scalar, examples trained on before this step.
      rate_factor, until_epoch: the block's.

    Returns:
      rate * rate_factor while examples_seen / num_examples < until_epoch, then 0; float64 scalar.
    """
    if rate_factor != 1:
        rate = rate * rate_factor
    if math.isinf(until_epoch):
        return rate
    return tf.where(tf.cast(examples_seen, tf.float64) / num_examples < until_epoch, rate, tf.zeros_like(rate))


def exponential_decay(
    initial: float, factor: float, epochs_per_decay: float, num_examples: int, examples_seen: tf.Tensor
) -> tf.Tensor:
    """Staircase decay, as tf.compat.v1.train.exponential_decay(staircase=True), counted in examples.

    initial * factor ** floor(examples_seen / decay_examples), decay_examples = floor(epochs_per_decay * num_examples).

    Args:
      initial: learning rate before the first decay.
      factor: what each decay multiplies it with.
      epochs_per_decay: epochs between decays.
      num_examples: examples an epoch.
      examples_seen: int64 scalar, examples trained on before this step.

    Returns:
      float64 scalar.
    """
    decay_examples = max(1, int(epochs_per_decay * num_examples))
    decays = tf.cast(examples_seen // decay_examples, tf.float64)
    return tf.constant(initial, tf.float64) * tf.constant(factor, tf.float64) ** decays


def piecewise_decay(
    initial: float, factor: float, boundaries: Sequence[int], num_examples: int, examples_seen: tf.Tensor
) -> tf.Tensor:
    """initial * factor ** (number of boundaries, in epochs, that were reached); else as exponential_decay."""
    reached = examples_seen >= tf.constant([epoch * num_examples for epoch in boundaries], tf.int64)
    decays = tf.reduce_sum(tf.cast(reached, tf.float64))
    return tf.constant(initial, tf.float64) * tf.constant(factor, tf.float64) ** decays


def share_done(config: Config, num_examples: int, examples_seen: tf.Tensor) -> tf.Tensor:
    """The share of the whole training, up to its last step, that so many examples are; float64 scalar, at most 1."""
    total = config.last_step(num_examples) * config.global_batch
    return tf.minimum(tf.cast(examples_seen, tf.float64) / total, 1.0)


def annealing(kind: str, initial: float, done: tf.Tensor) -> tf.Tensor:
    """From the initial rate down to 0 at the end.

    With t the share of the training that is done, float64 scalar: 'linear' is initial * (1 - t), 'cosine'
    initial * (1 + cos(pi * t)) / 2 (Loshchilov and Hutter 2017, "SGDR", equation 5).

    Returns:
      float64 scalar.
    """
    return initial * (1 - done if kind == "linear" else (1 + tf.cos(math.pi * done)) / 2)


def interpolation(course: Sequence[tuple[float, float]], done: tf.Tensor) -> tf.Tensor:
    """The value at a share of the training, linear between points; before the first and after the last it stays.

    Args:
      course: over points, (share, value), the shares rising.
      done: float64 scalar.

    Returns:
      float64 scalar.
    """
    value = tf.constant(course[0][1], tf.float64)
    for (start, before), (end, after) in itertools.pairwise(course):
        value += (after - before) * tf.clip_by_value((done - start) / (end - start), 0.0, 1.0)
    return value


def scaling(kind: str, global_batch: int, base_batch: int) -> float:
    """What the rate that suits base_batch is multiplied with for global_batch.

    'linear': their ratio (Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.1); 'sqrt': its square root,
    with which the variance of a step stays (Krizhevsky 2014, "One weird trick", section 5); 'none': 1.
    """
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[kind]


def warmup(scale: float, warmup_examples: float, examples_seen: tf.Tensor) -> tf.Tensor:
    """A factor that rises evenly to `scale` while the first warmup_examples are seen, and stays there.

    It begins at 1, the rate of the base batch, where `scale` is greater (Goyal et al. 2017, section 2.2), else at a
    tenth of `scale`.

    Returns:
      float64 scalar.
    """
    first = 1.0 if scale > 1 else scale / 10
    done = tf.minimum(tf.cast(examples_seen, tf.float64) / warmup_examples, 1.0)
    return first + (scale - first) * done
