"""The records of a built training graph, by which run/ trains it."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tower_train.examples import Examples
from tower_train.graph.layout import Layout
from tower_train.graph.stream import Stream


class StepReport(NamedTuple):
    """The small values of one step that run/ fetches; tensors in the graph, numpy values after the step.

    Attributes:
      step: int64 scalar, steps done, this one included.
      examples: int64 scalar, examples trained on, this step's included.
      loss: scalar, mean over towers plus weight decay, on the weights the gradients were taken at.
      data_loss: scalar, the loss without weight decay.
      learning_rate: float64 scalar, what the update used.
      stopping: scalar, above 0 if a worker has asked for the end, see TrainingGraph.ask_to_stop.
      finite: bool [towers + 1, 1 + gradients]: whether each tower's loss and gradients, and their means, are finite.
      input_secs: float64 scalar, seconds in which the step waited for input.
      loss_scale: float32 scalar, after the step; empty if there is none, see loss_scale.py.
      overflowed: bool scalar, whether the step was skipped and the scale halved; empty without a loss scale.
      summary: serialized Summary of this step; empty unless it is due.
    """

    step: tf.Tensor
    examples: tf.Tensor
    loss: tf.Tensor
    data_loss: tf.Tensor
    learning_rate: tf.Tensor
    stopping: tf.Tensor
    finite: tf.Tensor
    input_secs: tf.Tensor | tuple[()] = ()
    loss_scale: tf.Tensor | tuple[()] = ()
    overflowed: tf.Tensor | tuple[()] = ()
    summary: tf.Tensor | tuple[()] = ()


class RandomNumbers(NamedTuple):
    """The names of random numbers in a tower.

    Attributes:
      by_example: layers whose numbers are functions of the example's position.
      stateful: operations with a random state of their own, whose numbers depend on restarts too.
    """

    by_example: tuple[str, ...] = ()
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


class Compared(NamedTuple):
    """Values of a step by which towers are compared with one.

    Attributes:
      losses: over this worker's towers, scalars.
      gradients: {variable's name: its mean gradient, as it is applied}.
      of_loss: the gradients of tower 0's loss, without weight decay.
      assigned: {variable's name: the value that tower 0's layers assign to it}.
      normalizes: whether layers normalise by the statistics of a tower's batch.
    """

    losses: list[tf.Tensor]
    gradients: dict[str, tf.Tensor | tf.IndexedSlices]
    of_loss: list[tf.Tensor | tf.IndexedSlices]
    assigned: dict[str, tf.Tensor]
    normalizes: bool


class Choice(NamedTuple):
    """The choice of hard examples.

    Attributes:
      pass_at: position -> the number of the pass that has it.
      choose: bool scalar; chooses the examples of the next step's pass, if that is due; whether it was.
    """

    pass_at: Callable[[int], int]
    choose: tf.Tensor


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """A built training graph.

    Attributes:
      graph: the graph.
      layout: the topology of a step.
      examples: those that are trained on.
      stream: the batches; its initializer is run after variables hold their values.
      train_op: does one step; if a loss or gradient is not finite nothing but the stream moves, and with
        --on_nonfinite=skip, or where float16 overflowed, global_step, examples_seen and the loss scale.
      report: what to fetch with it.
      summary: serialized Summary of this step; None without --summary_every_steps.
      progress: {what: int64 scalar, steps of this session that it is done with}, for the watchdog; empty without one.
      ask_to_stop: asks all workers to end after the same step, the next; None for one worker.
      saved: the contents of a checkpoint.
      random_numbers: what in a tower draws random numbers.
      compared: values by which the towers are compared with one.
      choice: of hard examples, to be made between two steps; None if all are trained on.
      notes: lines for the log.
    """

    graph: tf.Graph
    layout: Layout
    examples: Examples
    stream: Stream
    train_op: tf.Operation
    report: StepReport
    ask_to_stop: tf.Operation | None
    progress: dict[str, tf.Tensor]
    summary: tf.Tensor | None
    saved: SavedVariables
    random_numbers: RandomNumbers
    compared: Compared
    choice: Choice | None
    notes: tuple[str, ...]

    @property
    def checked(self) -> tuple[str, ...]:
        """The names of report.finite's columns."""
        return "the loss", *(f"the gradient of {name}" for name in self.compared.gradients)
