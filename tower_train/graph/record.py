"""The record of a training graph, all that running knows of it."""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from tower_train.examples import Examples
from tower_train.graph.layout import Layout
from tower_train.graph.stream import Stream


class ScaleReport(NamedTuple):
    """The loss scale, see loss_scale.py.

    Attributes:
      scale: float32 scalar, after the step.
      overflowed: bool scalar, whether the step was skipped and the scale halved, since its gradients overflowed.
    """

    scale: tf.Tensor
    overflowed: tf.Tensor


class Request(NamedTuple):
    """One worker's request for what all do after the same step; the next step tells all of them.

    Attributes:
      value: scalar, above 0 while it asks.
      ask: op that begins to.
      forget: op that ends to.
    """

    value: tf.Tensor
    ask: tf.Operation
    forget: tf.Operation


class StepReport(NamedTuple):
    """The small values of one step that run/ fetches; tensors in the graph, numpy values after the step.

    Attributes:
      step: int64 scalar, steps done, this one included.
      examples: int64 scalar, examples trained on, this step's included.
      loss: scalar, mean over towers plus weight decay, on the weights the gradients were taken at.
      cross_entropy: scalar, the loss without weight decay.
      learning_rate: float64 scalar, what the update used.
      stopping: scalar, above 0 if a worker has asked for the end, see TrainingGraph.requests.
      finite: bool [towers + 1, 1 + gradients]: whether each tower's loss and gradients, and their means, are finite.
      loss_scale: empty if there is none.
      saving: scalar, above 0 if a worker has asked for a checkpoint; empty where the chief saves without the others.
      summary: serialized Summary of this step; empty unless it is due.
    """

    step: tf.Tensor
    examples: tf.Tensor
    loss: tf.Tensor
    cross_entropy: tf.Tensor
    learning_rate: tf.Tensor
    stopping: tf.Tensor
    finite: tf.Tensor
    loss_scale: ScaleReport | tuple[()] = ()
    saving: tf.Tensor | tuple[()] = ()
    summary: tf.Tensor | tuple[()] = ()


class RandomNumbers(NamedTuple):
    """The names of random numbers in a tower.

    Attributes:
      by_example: layers whose numbers are functions of the example's position.
      by_tower: layers whose numbers depend on the towers.
      stateful: operations with a random state of their own, whose numbers depend on restarts too.
    """

    by_example: tuple[str, ...] = ()
    by_tower: tuple[str, ...] = ()
    stateful: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SavedVariables:
    """The contents of a checkpoint.

    Attributes:
      variables: those in it. Local variables take their first values from these.
      finite: {name of one of them: bool scalar}, of those in floating point.
      copied: names of the variables of which there are several copies.
      fingerprints: int64 [copies of all workers, copied], of their bytes; None if copies are not compared.
      broadcast: gives this worker's variables the chief's values, but for the stream's state; None for one worker.
    """

    variables: list[tf.Variable]
    finite: dict[str, tf.Tensor]
    copied: tuple[str, ...] = ()
    fingerprints: tf.Tensor | None = None
    broadcast: tf.Operation | None = None

    @property
    def num_parameters(self) -> int:
        """The number of trained weights."""
        return sum(math.prod(variable.shape) for variable in self.variables if variable.trainable)


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """A built training graph.

    Attributes:
      graph: the graph.
      layout: the topology of a step.
      examples: those that are trained on.
      stream: the batches; its initializer is run after variables hold their values.
      train_op: does one step; if a loss or gradient is not finite nothing but the stream moves, and with
        --on_nonfinite=skip global_step and examples_seen.
      report: what to fetch with it.
      checked: names of what report.finite tells of, per column.
      summary: serialized Summary of this step; None without --summary_every_steps.
      progress: {what: int64 scalar, steps of this session that it is done with}, for the watchdog; empty without one.
      requests: what this worker may ask all workers for, by the name of what reports it: stopping; saving where their
        checkpoints hold something of each; none for one worker.
      saved: the contents of a checkpoint.
      random_numbers: what in a tower draws random numbers.
    """

    graph: tf.Graph
    layout: Layout
    examples: Examples
    stream: Stream
    train_op: tf.Operation
    report: StepReport
    requests: dict[str, Request]
    progress: dict[str, tf.Tensor]
    checked: tuple[str, ...]
    summary: tf.Tensor | None
    saved: SavedVariables
    random_numbers: RandomNumbers
