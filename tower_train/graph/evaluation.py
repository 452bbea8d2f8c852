"""The evaluation graph: N towers that count every example once."""

import dataclasses
import math

import tensorflow as tf

from tower_train.graph import stream, towers, update
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.variables import Variables
from tower_train.workload import Examples, Workload


@dataclasses.dataclass(frozen=True)
class EvaluationGraph:
    """The record of an evaluation graph, which is all that evaluating knows of it.

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
      workload, examples, devices: as for training.training_graph.
      tower_batch: examples a tower takes each step.
      dtype: of variables and arithmetic.
      moving_average_decay: the run's; 0 restores the weights themselves, else their moving averages.
    """
    graph, workload = tf.Graph(), workload.for_examples(examples)
    with graph.as_default(), tf.device(HOST):
        source, counted = stream.evaluation_stream(workload, examples, tower_batch, len(devices.towers))
        variables, outputs = Variables(), []
        for i, (device, (features, labels)) in enumerate(zip(devices.towers, source.batches, strict=True)):
            with towers.scope(i, device, variables, towers.restored):
                output, _ = towers.tower_loss(workload, features, labels, tf.as_dtype(dtype), training=False)
            outputs.append(output)

        def joined(by_tower: list[tf.Tensor]) -> tf.Tensor:
            return tf.boolean_mask(tf.concat(by_tower, axis=0), tf.concat(counted, axis=0))

        labels = [labels for _, labels in source.batches]
        by_tower = [workload.metrics(*tower) for tower in zip(outputs, labels, strict=True)]
        predictions = classes = None
        if examples.class_names:
            predictions = joined([tf.argmax(output, axis=-1) for output in outputs])
            classes = joined([tf.cast(own, tf.int64) for own in labels])
        return EvaluationGraph(
            graph=graph,
            metrics={name: joined([metrics[name] for metrics in by_tower]) for name in by_tower[0]},
            predictions=predictions,
            labels=classes,
            restored=update.variables_to_restore(moving_average_decay),
            stream_initializer=source.initializer,
            num_steps=math.ceil(examples.num_examples / (tower_batch * len(outputs))),
        )
