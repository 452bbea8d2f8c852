"""The learning rate as a function of examples seen, so that it does not change with the number of towers."""

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from tower_train.config import Config
from tower_train.graph.context import ParamGroup
from tower_train.options import rules

_MOST_EXAMPLES = 2**62  # more than any training, in 64 bits


def learning_rate(config: Config, num_examples: int, examples_seen: tf.Tensor) -> tf.Tensor:
    """Returns the rate of one step, float64 scalar: --learning_rate times the schedule's factor, scaled to the global
    batch, warmed up.

    Args:
      config: whole, as ten of its options make the rate.
      num_examples: examples per epoch.
      examples_seen: int64 scalar, examples trained on before this step.
    """
    scale = _scale(config)  # of the global batch, so that it does not depend on how towers divide it
    with tf.name_scope("learning_rate"):
        rate = config.learning_rate * _decay(config, num_examples, examples_seen)
        if not config.warmup_epochs:
            return rate * scale
        first = 1.0 if scale > 1 else scale / 10  # the base batch's (Goyal et al. 2017, section 2.2), or a tenth
        done = tf.minimum(tf.cast(examples_seen, tf.float64) / (config.warmup_epochs * num_examples), 1.0)
        return rate * (first + (scale - first) * done)


def note_on_resuming(config: Config, before: Config, num_examples: int, steps_done: int) -> list[str]:
    """Returns a line if a resumed run has another last step than `before`, to which its schedule now stretches."""
    last, was = (each.last_step(num_examples) for each in (config, before))
    if not steps_done or last == was or config.lr_schedule in ("exponential", "piecewise"):
        return []
    return [
        f"*** The last step was {was} and is now {last}. --lr_schedule={config.lr_schedule} stretches to it, so the "
        "learning rate jumps. --lr_schedule=exponential goes on at one rate."
    ]


def _scale(config: Config) -> float:
    """Returns the factor for the global batch: "linear" is of Goyal et al. 2017 ("Accurate, large minibatch SGD",
    section 2.1); with "sqrt" the variance of a step stays (Krizhevsky 2014, "One weird trick", section 5)."""
    ratio = config.global_batch / config.lr_base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def largest_factor(config: Config) -> float:
    """Returns by how much the greatest rate of a training is greater than --learning_rate."""
    points = rules.parse_points(config.lr_points) if config.lr_schedule == "points" else [(0.0, 1.0)]
    return _scale(config) * max(factor for _, factor in points)


def _decay(config: Config, num_examples: int, examples_seen: tf.Tensor) -> tf.Tensor:
    """Returns the schedule's factor. With t the share of the training that is done: 'linear' is 1 - t, 'cosine'
    (1 + cos(pi * t)) / 2 (Loshchilov and Hutter 2017, "SGDR", equation 5); the staircases count their stairs in
    examples, 'exponential' as tf.compat.v1.train.exponential_decay does in steps."""
    kind = config.lr_schedule
    if kind in ("exponential", "piecewise"):  # no share: it would change the graph with --max_steps
        if kind == "exponential":
            stairs = examples_seen // _examples(config.num_epochs_per_decay, num_examples)
        else:
            ends = tf.constant([_examples(epoch, num_examples) for epoch in config.lr_boundaries], tf.int64)
            stairs = tf.math.count_nonzero(examples_seen >= ends)
        return tf.constant(config.learning_rate_decay_factor, tf.float64) ** tf.cast(stairs, tf.float64)
    total = config.last_step(num_examples) * config.global_batch
    # float32 cannot tell examples beyond 2^24 apart
    done = tf.minimum(tf.cast(examples_seen, tf.float64) / total, 1.0)
    if kind == "linear":
        return 1 - done
    if kind == "cosine":
        return (1 + tf.cos(math.pi * done)) / 2
    return _interpolation(rules.parse_points(config.lr_points), done)


def _examples(epochs: float, num_examples: int) -> int:
    return max(1, int(min(epochs * num_examples, _MOST_EXAMPLES)))


def _interpolation(course: Sequence[tuple[float, float]], done: tf.Tensor) -> tf.Tensor:
    """Interpolates linearly between points (share, value); constant before the first and after the last."""
    value = tf.constant(course[0][1], tf.float64)
    for (start, before), (end, after) in itertools.pairwise(course):
        value += (after - before) * tf.clip_by_value((done - start) / (end - start), 0.0, 1.0)
    return value


def group_rate(rate: tf.Tensor, epochs_seen: tf.Tensor, group: ParamGroup) -> tf.Tensor:
    """Returns the rate of variables of tower_train.layers.param_group, at a step with this rate, after these epochs:
    rate * rate_factor while from_epoch <= epochs_seen < until_epoch, else 0; all float64 scalars."""
    if group.rate_factor != 1:
        rate = rate * group.rate_factor
    if math.isinf(group.until_epoch) and not group.from_epoch:  # usual: nothing to compute in each step
        return rate
    is_trained = (epochs_seen >= group.from_epoch) & (epochs_seen < group.until_epoch)
    return tf.where(is_trained, rate, tf.zeros_like(rate))
