"""The evaluation graph: N towers that count every example once."""

import dataclasses
import math
from collections.abc import Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.graph import context, stream, towers, update
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.replica import Replica
from tower_train.workload import Examples, Tensors, Workload


@dataclasses.dataclass(frozen=True)
class EvaluationGraph:
    """A built evaluation graph.

    Attributes:
      graph: the graph.
      metrics: {name: float [examples of this step]}.
      predictions, labels: int64 [examples of this step]; None if labels are not classes, or outputs not one per class.
      restored: {name in the checkpoint: variable}.
      stream_initializer: starts at the first example.
      num_steps: steps that count every example once.
      length: int64 scalar, tf.data's cardinality of examples in their own order; None for others.
    """

    graph: tf.Graph
    metrics: dict[str, tf.Tensor]
    predictions: tf.Tensor | None
    labels: tf.Tensor | None
    restored: dict[str, tf.Variable]
    stream_initializer: tf.Operation
    num_steps: int
    length: tf.Tensor | None = None


def evaluation_graph(
    workload: Workload, examples: Examples, tower_batch: int, dtype: str, moving_average_decay: float, devices: Devices
) -> EvaluationGraph:
    """Builds N towers that divide the examples among them, each example once.

    Args:
      workload, examples, devices: as for training.training_graph.
      tower_batch: examples per tower and step.
      dtype: of variables and arithmetic.
      moving_average_decay: the run's; 0 restores the weights themselves, else their moving averages.

    Raises:
      GraphError: the workload's metrics are not one number per example, or its outputs too few.
    """
    graph, workload = tf.Graph(), workload.for_examples(examples)
    with graph.as_default(), tf.device(HOST):
        source, counted = stream.evaluation_stream(workload, examples, tower_batch, len(devices.towers))
        replica, outputs, by_tower = Replica(), [], []
        for i, (device, (features, labels)) in enumerate(zip(devices.towers, source.batches, strict=True)):
            draws = Draws("evaluation", source.firsts[i], tower_batch)
            with replica.tower(Tower(i, device), towers.restored), context.entered(context.Context(draws=draws)):
                output, _ = towers.tower_loss(workload, features, labels, tf.as_dtype(dtype), training=False)
            with tf.compat.v1.name_scope(f"tower_{i}/metrics/"):
                by_tower.append(_metrics(workload, output, labels, tower_batch))
            outputs.append(output)

        def gathered(by_tower: list[tf.Tensor]) -> tf.Tensor:
            return tf.boolean_mask(tf.concat(by_tower, axis=0), tf.concat(counted, axis=0))

        labels = [labels for _, labels in source.batches]
        towers.check_classes(workload, examples, outputs[0], workload.metrics)
        predictions = classes = None
        if towers.are_of_classes(outputs[0], examples) and tf.is_tensor(labels[0]) and labels[0].shape.rank == 1:
            predictions = gathered([tf.argmax(output, axis=-1) for output in outputs])
            classes = gathered([tf.cast(batch, tf.int64) for batch in labels])
        return EvaluationGraph(
            graph=graph,
            metrics={name: gathered([metrics[name] for metrics in by_tower]) for name in by_tower[0]},
            predictions=predictions,
            labels=classes,
            restored=update.variables_to_restore(moving_average_decay),
            stream_initializer=source.initializer,
            num_steps=math.ceil(examples.num_examples / (tower_batch * len(outputs))),
            length=tf.data.experimental.cardinality(examples.elements()) if examples.elements else None,
        )


def _metrics(workload: Workload, outputs: Tensors, labels: Tensors, batch: int) -> dict[str, tf.Tensor]:
    """Returns one tower's metrics, each [batch]; GraphError if they have another form, or `mode` names others."""
    metrics = workload.metrics(outputs, labels)
    if not isinstance(metrics, Mapping) or not metrics:
        raise errors.GraphError(
            f"workload {workload.name}: metrics returned {metrics!r}. Let it return {{name: tensor [batch]}}, at least "
            "one metric."
        )
    metrics = {name: tf.convert_to_tensor(values) for name, values in metrics.items()}
    metrics = {name: values[:, 0] if values.shape[1:] == [1] else values for name, values in metrics.items()}
    for name, values in metrics.items():
        if not values.shape.is_compatible_with([batch]) or values.dtype == tf.string:
            is_broadcast = values.shape == [batch, batch]
            raise errors.GraphError(
                f"workload {workload.name}: the metric {name!r} is {values.dtype.name} {list(values.shape)} for a batch"
                f" of {batch} examples. Let metrics return one number for each example, [{batch}], and no mean over "
                "the batch: evaluation takes the mean over all examples."
                + " Outputs [batch, 1] and labels [batch] give such a shape."
                * is_broadcast
            )
    if unknown := [name for name in workload.mode if name not in metrics]:
        raise errors.GraphError(
            f"workload {workload.name}: mode names {unknown[0]!r}, but its metrics are {', '.join(metrics)}. Name one "
            "of these."
        )
    return {name: tf.ensure_shape(values, [batch]) for name, values in metrics.items()}
