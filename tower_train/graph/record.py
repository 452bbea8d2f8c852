"""The record of a training graph, all that running knows of it."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tower_train.graph.iterator_state import IteratorState


class ScaleReport(NamedTuple):
    """The loss scale, see loss_scale.py.

    Attributes:
      scale: float32 scalar, after the step.
      overflowed: bool scalar, whether the step was skipped and the scale halved, since its gradients overflowed.
    """

    scale: tf.Tensor
    overflowed: tf.Tensor


class Wish(NamedTuple):
    """One worker's wish for what all do after the same step; the next step tells all of them.

    Attributes:
      value: scalar, above 0 while it wishes.
      ask: op that begins to.
      forget: op that ends to.
    """

    value: tf.Tensor
    ask: tf.Operation
    forget: tf.Operation


class StepReport(NamedTuple):
    """The small values of one step that running looks at; tensors in the graph, numpy values after the step.

    Attributes:
      step: int64 scalar, steps done, this one included.
      examples: int64 scalar, examples trained on, this step's included.
      loss: scalar, mean over towers plus weight decay, on the weights the gradients were taken at.
      cross_entropy: scalar, the loss without weight decay.
      learning_rate: float64 scalar, what the update used.
      stopping: scalar, above 0 if a worker has asked for the end, see TrainingGraph.wishes.
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
class TrainingGraph:
    """A built training graph.

    Attributes:
      graph: the graph.
      data: the name of the examples.
      data_order: what workers must have in common to go through them in the same order, if they do; else empty.
      train_op: does one step; if a loss or gradient is not finite nothing but the stream moves, and with
        --on_nonfinite=skip global_step and examples_seen.
      report: what to fetch with it.
      global_step: int64 variable, steps done.
      summary: serialized Summary of this step; None without --summary_every_steps.
      progress: {what: int64 scalar, steps of this session that it is done with}, for the watchdog; empty without one.
      checked: names of what report.finite tells of, per column.
      variables: what a checkpoint holds. Local variables take their first values from these.
      variables_finite: {name of one of them: bool scalar}, of those in floating point.
      fingerprints: int64 [copies of all workers, variables], see Variables.fingerprints; None if they are not
        checked.
      copied: over the columns of fingerprints, the variable's name.
      stream_initializer: starts the stream at the variable examples_seen.
      stream_state: what else a checkpoint needs to hold of the stream, if that does not say it all; else None.
      broadcast: gives this worker's variables the chief's values, but for stream_state's; None for one worker.
      wishes: what this worker may ask all workers for, by the name of what reports it: stopping; saving where their
        checkpoints hold something of each; none for one worker.
      num_parameters: number of trained weights.
      num_towers: rows of report.finite, less one.
      num_workers: each with as many devices.
      towers_of_each: over workers, the batches that its towers take in a step.
      global_batch: examples a step.
      num_examples: examples an epoch.
      random_numbers: what in a tower draws random numbers.
      notes: lines on where examples are distorted, and on how workers share them, if that is not always so.
    """

    graph: tf.Graph
    data: str
    data_order: str
    train_op: tf.Operation
    report: StepReport
    global_step: tf.Variable
    summary: tf.Tensor | None
    progress: dict[str, tf.Tensor]
    checked: tuple[str, ...]
    variables: list[tf.Variable]
    variables_finite: dict[str, tf.Tensor]
    fingerprints: tf.Tensor | None
    copied: tuple[str, ...]
    stream_initializer: tf.Operation
    stream_state: IteratorState | None
    broadcast: tf.Operation | None
    wishes: dict[str, Wish]
    num_parameters: int
    num_towers: int
    num_workers: int
    towers_of_each: tuple[int, ...]
    global_batch: int
    num_examples: int
    random_numbers: RandomNumbers
    notes: tuple[str, ...] = ()
