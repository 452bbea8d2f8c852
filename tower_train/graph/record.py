"""The records of a built training graph, by which run/ trains it."""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from tower_train.examples import Examples
from tower_train.graph.layout import Layout
from tower_train.graph.order import Choice
from tower_train.graph.step_plan import StepPlan
from tower_train.graph.stream import Stream


class StepReport(NamedTuple):
    """The small values of one step that run/ fetches; tensors in the graph, numpy values after the step."""

    step: tf.Tensor  # int64 scalar, steps done, this one included
    examples: tf.Tensor  # int64 scalar, examples trained on, this step's included
    loss: tf.Tensor  # scalar, mean over towers plus the regularizers, on the weights the gradients were taken at
    data_loss: tf.Tensor  # scalar, the loss without the regularizers, which events show beside it as the original's do
    learning_rate: tf.Tensor  # float64 scalar, what the update used
    stopping: tf.Tensor  # scalar, above 0 once a worker has run TrainingGraph.ask_to_stop
    # bool [towers + 1, 1 + gradients]: whether each tower's loss and gradients, and their means, are finite
    finite: tf.Tensor
    input_secs: tf.Tensor | tuple[()] = ()  # float64 scalar, seconds in which the step waited for input
    # () and not None for what a step lacks, as a session refuses to fetch None
    loss_scale: tf.Tensor | tuple[()] = ()  # float32 scalar, after the step
    overflowed: tf.Tensor | tuple[()] = ()  # bool scalar, the step was skipped and the loss scale halved
    summary: tf.Tensor | tuple[()] = ()  # serialized Summary, if it is due


@dataclasses.dataclass(frozen=True)
class SavedVariables:
    """The contents of a checkpoint."""

    variables: list[tf.Variable]  # copies, which are local variables, take their first values from these
    finite: dict[str, tf.Tensor]  # {variable's name: bool scalar}, of those in floating point; asked before each save
    copied: tuple[str, ...] = ()  # names of the variables that have several copies
    fingerprints: tf.Tensor | None = None  # int64 [copies of all workers, copied]; None if copies are not compared
    # gives this worker's variables the chief's values, except the stream's state; None for one worker
    broadcast: tf.Operation | None = None

    @property
    def num_parameters(self) -> int:
        """The number of trained weights."""
        # of one copy, so that the number does not tell how many there are
        return sum(math.prod(variable.shape) for variable in self.variables if variable.trainable)


class Compared(NamedTuple):
    """Values of a step by which towers are compared with one."""

    losses: list[tf.Tensor]  # over this worker's towers, scalars
    gradients: dict[str, tf.Tensor | tf.IndexedSlices]  # {variable's name: its mean gradient, as it is applied}
    assigned: dict[str, tf.Tensor]  # {variable's name: the value that tower 0's layers assign to it}
    normalizes: bool  # layers normalise by the statistics of a tower's batch


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """A built training graph."""

    graph: tf.Graph
    plan: StepPlan
    stream: Stream
    # does one step; if a loss or gradient is not finite only the stream moves and, if the step is skipped, global_step,
    # examples_seen and the loss scale
    train_op: tf.Operation
    report: StepReport  # to fetch with it
    ask_to_stop: tf.Operation | None  # asks all workers to end after the same step, the next; None for one worker
    progress: dict[str, tf.Tensor]  # as of outputs.progress, for the watchdog
    # serialized Summary, computed only in steps that fetch it; None without --summary_every_steps
    summary: tf.Tensor | None
    saved: SavedVariables
    stateful: tuple[str, ...]  # operations with a random state, whose numbers depend on towers and restarts
    compared: Compared
    choice: Choice | None  # of hard examples, to be made between two steps; None if all are trained on
    notes: tuple[str, ...]  # for the log

    @property
    def layout(self) -> Layout:
        """The topology of a step."""
        return self.plan.layout

    @property
    def examples(self) -> Examples:
        """The examples that are trained on."""
        return self.plan.examples

    @property
    def checked(self) -> tuple[str, ...]:
        """The names of report.finite's columns."""
        return "the loss", *(f"the gradient of {name}" for name in self.compared.gradients)
