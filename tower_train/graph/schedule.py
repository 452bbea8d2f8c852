"""The learning rate as a function of examples seen, so that it does not change with the number of towers."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from tower_train.graph.context import ParamGroup

_MOST_EXAMPLES = 2**62  # more than any training, in 64 bits


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of a run.

    Attributes:
      kind: --lr_schedule.
      initial: --learning_rate.
      factor: --learning_rate_decay_factor, of 'exponential' and 'piecewise'.
      epochs_per_decay: --num_epochs_per_decay, of 'exponential'.
      boundaries: --lr_boundaries in epochs, of 'piecewise'.
      points: --lr_points as (share of the training, factor), of 'points'.
      scale: multiplies the rate for the global batch, see `scaling`.
      warmup_epochs: --warmup_epochs.
      num_examples: examples an epoch.
      total_examples: examples that the whole training sees.
    """

    kind: str
    initial: float
    factor: float
    epochs_per_decay: float
    boundaries: Sequence[int] | None
    points: Sequence[tuple[float, float]] | None
    scale: float
    warmup_epochs: float
    num_examples: int
    total_examples: int

    def rate(self, examples_seen: tf.Tensor) -> tf.Tensor:
        """Returns the rate of one step: initial rate times the schedule's factor, scaled to the global batch, warmed
        up.

        Args:
          examples_seen: int64 scalar, examples trained on before this step.

        Returns:
          float64 scalar.
        """
        rate = self.initial * self._decay(examples_seen)
        if not self.warmup_epochs:
            return rate * self.scale
        return rate * warmup(self.scale, self.warmup_epochs * self.num_examples, examples_seen)

    def _decay(self, examples_seen: tf.Tensor) -> tf.Tensor:
        """Returns the schedule's factor. With t the share of the training that is done: 'linear' is 1 - t, 'cosine'
        (1 + cos(pi * t)) / 2 (Loshchilov and Hutter 2017, "SGDR", equation 5); the staircases count their stairs in
        examples, 'exponential' as tf.compat.v1.train.exponential_decay does in steps."""
        if self.kind in ("exponential", "piecewise"):  # no share: it would change the graph with --max_steps
            if self.kind == "exponential":
                stairs = examples_seen // self._examples(self.epochs_per_decay)
            else:
                ends = tf.constant([self._examples(epoch) for epoch in self.boundaries], tf.int64)
                stairs = tf.math.count_nonzero(examples_seen >= ends)
            return tf.constant(self.factor, tf.float64) ** tf.cast(stairs, tf.float64)
        done = tf.minimum(tf.cast(examples_seen, tf.float64) / self.total_examples, 1.0)
        if self.kind == "linear":
            return 1 - done
        if self.kind == "cosine":
            return (1 + tf.cos(math.pi * done)) / 2
        return interpolation(self.points, done)

    def _examples(self, epochs: float) -> int:
        return max(1, int(min(epochs * self.num_examples, _MOST_EXAMPLES)))


def group_rate(rate: tf.Tensor, epochs_seen: tf.Tensor, group: ParamGroup) -> tf.Tensor:
    """Returns the rate of variables of tower_train.layers.param_group.

    Args:
      rate: float64 scalar, of the step.
      epochs_seen: float64 scalar, examples trained on before this step / examples per epoch.
      group: the block's.

    Returns:
      rate * rate_factor while epochs_seen < until_epoch, then 0; float64 scalar.
    """
    if group.rate_factor != 1:
        rate = rate * group.rate_factor
    if math.isinf(group.until_epoch):
        return rate
    return tf.where(epochs_seen < group.until_epoch, rate, tf.zeros_like(rate))


def interpolation(course: Sequence[tuple[float, float]], done: tf.Tensor) -> tf.Tensor:
    """Interpolates linearly between points over the training; constant before the first and after the last.

    Args:
      course: over points, (share, value), the shares rising.
      done: float64 scalar, as is the result.
    """
    value = tf.constant(course[0][1], tf.float64)
    for (start, before), (end, after) in itertools.pairwise(course):
        value += (after - before) * tf.clip_by_value((done - start) / (end - start), 0.0, 1.0)
    return value


def scaling(kind: str, global_batch: int, base_batch: int) -> float:
    """Returns the factor that brings a learning rate from base_batch to global_batch.

    'linear': their ratio (Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.1); 'sqrt': its square root,
    with which the variance of a step stays (Krizhevsky 2014, "One weird trick", section 5); 'none': 1.
    """
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[kind]


def warmup(scale: float, warmup_examples: float, examples_seen: tf.Tensor) -> tf.Tensor:
    """Returns a factor that rises linearly to `scale` over the first warmup_examples, and stays there; float64 scalar.

    It begins at 1, the rate of the base batch, if `scale` is greater (Goyal et al. 2017, section 2.2), else at a tenth
    of `scale`.
    """
    first = 1.0 if scale > 1 else scale / 10
    done = tf.minimum(tf.cast(examples_seen, tf.float64) / warmup_examples, 1.0)
    return first + (scale - first) * done
