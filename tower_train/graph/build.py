"""The training graph and the evaluation graph, each put together on one screen."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors, layers
from tower_train.config import Config
from tower_train.graph import (
    gradients,
    lookahead,
    mirrors,
    progress,
    schedule,
    statistics,
    strategy,
    stream,
    summaries,
    towers,
    update,
)
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.iterator_state import IteratorState
from tower_train.workload import Examples, Workload, softmax_cross_entropy

v1 = tf.compat.v1


class StepReport(NamedTuple):
    """The small values of one step that running looks at; tensors in the graph, numpy values after the step.

    Attributes:
      step: int64 scalar, steps done, this one included.
      examples: int64 scalar, examples trained on, this step's included.
      loss: scalar, mean over towers plus weight decay, on the weights the gradients were taken at.
      learning_rate: float64 scalar, what the update used.
      stopping: scalar, above 0 where a worker has asked for the end, see TrainingGraph.ask_to_stop.
      finite: bool [towers + 1, 1 + gradients]: whether each tower's loss and gradients, and their means, are finite.
    """

    step: tf.Tensor
    examples: tf.Tensor
    loss: tf.Tensor
    learning_rate: tf.Tensor
    stopping: tf.Tensor
    finite: tf.Tensor


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """What running needs to know of a training graph.

    Attributes:
      graph: the graph.
      data: the name of the examples.
      train_op: does one step; where a loss or gradient is not finite nothing but the stream moves, and with
        --on_nonfinite=skip global_step and examples_seen.
      report: what to fetch with it.
      global_step: int64 variable, steps done.
      summary: serialized Summary of this step.
      progress: {what: int64 scalar, steps of this session that it is done with}, for the watchdog; empty without one.
      checked: names of what report.finite tells of, per column.
      variables: what a checkpoint holds. Local variables take their first values from these.
      variables_finite: {name of one of them: bool scalar}, of those in floating point.
      fingerprints: int64 [copies of all workers, variables], see mirrors.fingerprints; None where there is one copy.
      copied: over the columns of fingerprints, the variable's name.
      stream_initializer: starts the stream at the variable examples_seen.
      stream_state: what else a checkpoint needs to hold of the stream, where that does not say it all; else None.
      broadcast: gives this worker's variables the chief's values; None for one worker.
      ask_to_stop: makes the steps from the next on tell all workers, in report.stopping, that this one wants to stop;
        None for one worker.
      num_parameters: number of trained weights.
      num_towers: rows of report.finite, less one.
      num_workers: each with as many towers.
      global_batch: examples a step.
      num_examples: examples an epoch.
    """

    graph: tf.Graph
    data: str
    train_op: tf.Operation
    report: StepReport
    global_step: tf.Variable
    summary: tf.Tensor
    progress: dict[str, tf.Tensor]
    checked: tuple[str, ...]
    variables: list[tf.Variable]
    variables_finite: dict[str, tf.Tensor]
    fingerprints: tf.Tensor | None
    copied: tuple[str, ...]
    stream_initializer: tf.Operation
    stream_state: IteratorState | None
    broadcast: tf.Operation | None
    ask_to_stop: tf.Operation | None
    num_parameters: int
    num_towers: int
    num_workers: int
    global_batch: int
    num_examples: int


def training_graph(workload: Workload, examples: Examples, config: Config, devices: Devices) -> TrainingGraph:
    """Builds N towers, the mean of their gradients, and one update of the variables or of each copy of them.

    Raises:
      GraphError: the workload's network breaks a rule of the towers.
      ConfigError: an option that this network has no use for.
    """
    graph, dtype, workload = tf.Graph(), tf.as_dtype(config.dtype), workload.for_examples(examples)
    workload = _with_smooth_labels(workload, config.label_smoothing)
    with graph.as_default(), tf.device(HOST):
        v1.set_random_seed(config.seed & 0x7FFFFFFF)
        global_step = v1.train.create_global_step()
        examples_seen = v1.get_variable("examples_seen", [], tf.int64, v1.zeros_initializer(), trainable=False)
        # With accumulate_steps a device computes several towers, one after the other.
        places = tuple(device for device in devices.towers for _ in range(config.accumulate_steps))
        copies, all_reduce = strategy.choose(config, devices)
        input_stream = stream.training_stream(
            workload, examples, config.seed, examples_seen, config.tower_batch, len(places), devices.num_workers,
            devices.worker,
        )  # fmt: skip
        learning_rate = schedule.learning_rate(config, examples.num_examples, examples_seen)
        v1.add_to_collection(layers.EPOCHS_SEEN, tf.cast(examples_seen, tf.float64) / examples.num_examples)
        if config.sync_batch_norm:
            v1.add_to_collection(layers.SYNCHRONIZED, len(devices.towers) * devices.num_workers)
        v1.add_to_collection(layers.TOWERS_BEFORE, devices.worker * len(places))
        replicas, tower_grads = [], []
        batches = _one_after_the_other(input_stream.batches, config.accumulate_steps, tower_grads)
        for tower in towers.build_towers(workload, batches, places, dtype, config.seed, copies=copies):
            weights = v1.trainable_variables()
            own = copies.of(copies.index(len(replicas)), weights)
            with tf.device(tower.device), v1.name_scope(f"{tower.name}/"):
                tower_grads.append(list(zip(v1.gradients(tower.loss, own), weights, strict=True)))
            replicas.append(tower)
        moving = statistics.average_statistics(len(replicas), copies)
        if config.sync_batch_norm and not any(statistic.followed for statistic in moving[0]):
            raise errors.ConfigError(
                f"--sync_batch_norm: workload {workload.name} has no tower_train.layers.batch_normalization "
                "that is trained. Leave the option out."
            )
        tower_losses = tf.stack([tower.loss for tower in replicas])
        stopping, ask_to_stop = tf.zeros([], tower_losses.dtype), None
        if devices.num_workers > 1:
            wish = v1.get_variable("stopping", [], stopping.dtype, v1.zeros_initializer(), trainable=False,
                                   collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
            stopping, ask_to_stop = wish.read_value(), wish.assign(1, read_value=False)
        means = strategy.means(
            tower_losses, stopping, gradients.trained_in_all(tower_grads), moving, copies, all_reduce
        )
        group_rate = functools.partial(schedule.group_rate, learning_rate, examples.num_examples, examples_seen)
        updates = [strategy.Update(config, copies, i, own, group_rate, global_step) for i, own in enumerate(means)]
        loss, applied_grads = updates[0].loss, updates[0].gradients
        counts, ahead = [(global_step, 1), (examples_seen, config.global_batch)], None
        if config.lookahead_every_steps:
            ahead = lookahead.Lookahead(config, examples.num_examples, global_step, examples_seen)

        def apply():
            with tf.control_dependencies([own.apply(ahead) for own in updates]):
                return update.count_step(counts + (ahead.counts if ahead else []))

        with copies.updated(), tf.control_dependencies(all_reduce.operations):
            finite = gradients.update_if_finite(
                tower_grads, tower_losses, applied_grads, loss, apply,
                # A skipped step counts, so that each step has its own examples, and the next one has others.
                (lambda: update.count_step(counts)) if config.on_nonfinite == "skip" else tf.no_op,
            )  # fmt: skip
        counting, counts_so_far = [], {}
        if config.stall_timeout_secs:
            losses = [tower.loss for tower in replicas]
            counting, counts_so_far = progress.count_progress(input_stream.batches, losses, tower_grads)
        with tf.control_dependencies([finite, *counting]):
            step, seen = global_step.read_value(), examples_seen.read_value()
            report = StepReport(step, seen, loss, learning_rate, means[0].stopping, finite)
        fingerprints = None
        if len(copies) * devices.num_workers > 1:
            fingerprints = all_reduce.gather(mirrors.fingerprints(copies.pairs()))
        variables = graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
        variables_finite = {v.op.name: gradients.is_finite(v) for v in variables if v.dtype.is_floating}
        broadcast = all_reduce.broadcast(variables, devices.worker) if devices.num_workers > 1 else None
        scalars = {"total_loss": loss, "cross_entropy": means[0].loss, "learning_rate": learning_rate}
        summary = summaries.step_summary(scalars, applied_grads, replicas[0], input_stream.batches[0][0], finite.op)
    return TrainingGraph(
        graph=graph,
        data=examples.name,
        train_op=finite.op,
        report=report,
        global_step=global_step,
        summary=summary,
        progress=counts_so_far,
        checked=("the loss", *(f"the gradient of {variable.op.name}" for _, variable in applied_grads)),
        variables=variables,
        variables_finite=variables_finite,
        fingerprints=fingerprints,
        copied=tuple(original.op.name for original, _ in copies.pairs()),
        stream_initializer=input_stream.initializer,
        stream_state=input_stream.state,
        broadcast=broadcast,
        ask_to_stop=ask_to_stop,
        num_parameters=sum(math.prod(variable.shape) for variable in weights),
        num_towers=len(replicas),
        num_workers=devices.num_workers,
        global_batch=config.global_batch,
        num_examples=examples.num_examples,
    )


def _with_smooth_labels(workload: Workload, label_smoothing: float) -> Workload:
    if not label_smoothing:
        return workload
    if workload.loss is not softmax_cross_entropy:
        raise errors.ConfigError(
            f"--label_smoothing={label_smoothing:g}: workload {workload.name} has a loss of its own: smooth there."
        )
    return dataclasses.replace(workload, loss=functools.partial(softmax_cross_entropy, label_smoothing=label_smoothing))


def _one_after_the_other(batches: list, together: int, tower_grads: list) -> Iterator:
    """The towers' batches, each of which is there only when the tower before it on its device has its gradients, so
    that a device holds the activations of one at a time.

    Args:
      batches: over towers, (features, labels).
      together: how many consecutive towers share a device.
      tower_grads: the gradients of the towers before the one whose batch is asked for.
    """
    for i, batch in enumerate(batches):
        if i % together:
            before = [grad.op for grad, _ in tower_grads[-1] if grad is not None]
            with tf.control_dependencies(before):
                batch = tf.nest.map_structure(tf.identity, batch)
        yield batch


@dataclasses.dataclass(frozen=True)
class EvaluationGraph:
    """What evaluating needs to know of an evaluation graph.

    Attributes:
      graph: the graph.
      metrics: {name: float [examples of this step]}.
      predictions, labels: int64 [examples of this step]; None where labels are not classes.
      restored: {name in the checkpoint: variable}.
      stream_initializer: starts at the first example.
      num_steps: steps that count every example once.
    """

    graph: tf.Graph
    metrics: dict[str, tf.Tensor]
    predictions: tf.Tensor | None
    labels: tf.Tensor | None
    restored: dict[str, tf.Variable]
    stream_initializer: tf.Operation
    num_steps: int


def evaluation_graph(
    workload: Workload, examples: Examples, tower_batch: int, dtype: str, moving_average_decay: float, devices: Devices
) -> EvaluationGraph:
    """Builds N towers that share the examples out among them, each example once.

    Args:
      workload, examples, devices: as for training_graph.
      tower_batch: examples a tower takes each step.
      dtype: of variables and arithmetic.
      moving_average_decay: the run's; 0 restores the weights themselves, else their moving averages.
    """
    graph, workload = tf.Graph(), workload.for_examples(examples)
    with graph.as_default(), tf.device(HOST):
        input_stream, counted = stream.evaluation_stream(workload, examples, tower_batch, len(devices.towers))
        replicas = list(
            towers.build_towers(workload, input_stream.batches, devices.towers, tf.as_dtype(dtype), training=False)
        )

        def joined(by_tower: list[tf.Tensor]) -> tf.Tensor:
            return tf.boolean_mask(tf.concat(by_tower, axis=0), tf.concat(counted, axis=0))

        by_tower = [workload.metrics(tower.outputs, tower.labels) for tower in replicas]
        metrics = {name: joined([metrics[name] for metrics in by_tower]) for name in by_tower[0]}
        predictions = labels = None
        if examples.class_names:
            predictions = joined([tf.argmax(tower.outputs, axis=-1) for tower in replicas])
            labels = joined([tf.cast(tower.labels, tf.int64) for tower in replicas])
        restored = update.variables_to_restore(moving_average_decay)
    num_steps = math.ceil(examples.num_examples / (tower_batch * len(replicas)))
    return EvaluationGraph(graph, metrics, predictions, labels, restored, input_stream.initializer, num_steps)
