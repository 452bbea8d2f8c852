"""The evaluation graph: N towers that count every example once."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import errors, user_functions
from tower_train.examples import Examples, Tensors, Weighted, in_fixed_order
from tower_train.graph import gradients, towers, xla
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.stream import iterator_over, prepared, with_batch_size
from tower_train.graph.transfer import Batches
from tower_train.graph.variables import Variables
from tower_train.inference import network
from tower_train.workload import Workload


class EvaluationStream(NamedTuple):
    """Every example once, in order of its index."""

    batches: Batches  # over towers, (features, labels); each session.run consumes one step of all of them
    counted: list[tf.Tensor]  # over towers, bool [tower_batch], which examples count
    firsts: list[tf.Tensor]  # over towers, int64 scalar, the index of its first example
    initializer: tf.Operation  # op that puts the stream at its start

    def gathered(self, by_tower: Sequence[Tensors]) -> Tensors:
        """Joins the rows of towers, without those that only fill up the end."""
        counted = tf.concat(self.counted, axis=0)
        return tf.nest.map_structure(lambda *rows: tf.boolean_mask(tf.concat(rows, axis=0), counted), *by_tower)


@dataclasses.dataclass(frozen=True)
class EvaluationGraph:
    """A built evaluation graph."""

    graph: tf.Graph
    # of the examples of a step: `number`; `metrics`, {name: float [examples]}; and if there are any
    #   loss: scalar, the sum over examples; if the loss takes the network's outputs
    #   whole: (outputs, labels), for metrics of a whole set
    #   predictions, labels: int64 [examples]; if labels are classes, and outputs one per class
    fetches: dict[str, Tensors]
    has_classes: bool  # whether outputs are [batch, classes]
    restored: dict[str, tf.Variable]  # {name in the checkpoint: variable}
    stream_initializer: tf.Operation  # starts at the first example
    num_steps: int  # steps that count every example once
    # int64 scalar, tf.data's cardinality of examples in their own order; None for others
    length: tf.Tensor | None = None


def evaluation_graph(
    workload: Workload,
    examples: Examples,
    tower_batch: int,
    dtype: str,
    moving_average_decay: float,
    devices: Devices,
    is_compiled: bool = False,
) -> EvaluationGraph:
    """Builds N towers that divide the examples among them, each example once.

    With a moving_average_decay of 0 the weights themselves are restored, else their moving averages. If is_compiled,
    XLA compiles the towers, and the devices' session_config is set for it. Raises GraphError if the workload's metrics
    are not one number per example, or its outputs too few.
    """
    graph, workload = tf.Graph(), workload.for_examples(examples)
    with graph.as_default(), tf.device(HOST):
        stream = evaluation_stream(workload, examples, tower_batch, len(devices.towers))
        variables, outputs, by_tower, losses = Variables(), [], [], []
        labels = [Weighted.of(labels).labels for _, labels in stream.batches]
        for i, (device, (features, weighted)) in enumerate(zip(devices.towers, stream.batches, strict=True)):
            draws = Draws("evaluation", stream.firsts[i], tower_batch)
            output, _ = network.trained_outputs(
                workload, features, dtype, variables, Tower(i, device), draws, is_compiled
            )
            with tf.compat.v1.name_scope(f"tower_{i}/metrics/"):
                by_tower.append(_metrics(workload, output, labels[i], tower_batch))
                losses.append(_sum_of_losses(workload, output, weighted, stream.counted[i]))
            outputs.append(output)

        gradients.forget_functions(graph)
        if is_compiled:
            xla.prepare(graph, devices.session_config)

        towers.check_classes(workload, examples, outputs[0], workload.metrics)
        fetches = {
            "number": tf.reduce_sum(tf.cast(tf.concat(stream.counted, axis=0), tf.int64)),
            "metrics": {name: stream.gathered([metrics[name] for metrics in by_tower]) for name in by_tower[0]},
        }
        if None not in losses:
            fetches["loss"] = tf.add_n(losses)
        if not callable(workload.metrics):
            fetches["whole"] = stream.gathered(outputs), stream.gathered(labels)
        has_classes = network.are_of_classes(outputs[0], examples)
        if has_classes and tf.is_tensor(labels[0]) and labels[0].shape.rank == 1:
            fetches["predictions"] = stream.gathered([tf.argmax(output, axis=-1) for output in outputs])
            fetches["labels"] = stream.gathered([tf.cast(batch, tf.int64) for batch in labels])
        return EvaluationGraph(
            graph=graph,
            fetches=fetches,
            has_classes=has_classes,
            restored=network.variables_to_restore(moving_average_decay),
            stream_initializer=stream.initializer,
            num_steps=math.ceil(examples.num_examples / (tower_batch * len(outputs))),
            length=tf.data.experimental.cardinality(examples.opened_elements()) if examples.elements else None,
        )


def evaluation_stream(workload: Workload, examples: Examples, tower_batch: int, num_towers: int) -> EvaluationStream:
    """Makes a stream of every example once, in order of its index, prepared on the host.

    Every tower always gets tower_batch examples, since not every convolution accepts none: the end is filled up with
    the last example.
    """
    step_size = tower_batch * num_towers
    if examples.elements:
        steps = tf.data.Dataset.range(0, np.iinfo(np.int64).max, step_size)
        steps = tf.data.Dataset.zip(steps, in_fixed_order(examples.opened_elements()).batch(step_size))
    else:
        steps, fetch = tf.data.Dataset.range(0, examples.num_examples, step_size), examples.opened()

    def part(tower: int, first: tf.Tensor, batch: tuple[Tensors, Tensors] | None = None):
        places = tower * tower_batch + tf.range(tower_batch, dtype=tf.int64)
        if batch is None:
            places, end = places + first, examples.num_examples
            features, labels = fetch(tf.minimum(places, end - 1))
        else:
            end = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
            features, labels = tf.nest.map_structure(lambda t: tf.gather(t, tf.minimum(places, end - 1)), batch)
        features = prepared(workload, features)
        return with_batch_size((features, labels, places < end), tower_batch)

    iterator = iterator_over(
        steps, lambda *step: (step[0], tuple(part(i, *step) for i in range(num_towers))), examples, num_towers
    )
    first, parts = iterator.get_next()
    firsts = [first + i * tower_batch for i in range(num_towers)]
    return EvaluationStream([part[:2] for part in parts], [part[2] for part in parts], firsts, iterator.initializer)


def _metrics(workload: Workload, outputs: Tensors, labels: Tensors, batch: int) -> dict[str, tf.Tensor]:
    """Returns one tower's metrics, each [batch]; GraphError if they have another form, or `mode` names others."""
    if not callable(workload.metrics):
        return {}
    metrics = user_functions.call(workload, "metrics", outputs, labels)
    metrics = {name: tf.convert_to_tensor(values) for name, values in metrics.items()}
    metrics = {name: values[:, 0] if values.shape[1:] == [1] else values for name, values in metrics.items()}
    for name, values in metrics.items():
        if not values.shape.is_compatible_with([batch]) or values.dtype == tf.string:
            raise errors.GraphError(
                f"workload {workload.name}: the metric {name!r} is {values.dtype.name} {list(values.shape)} for a batch"
                f" of {batch} examples. Let metrics return one number for each example, [{batch}], and no mean over "
                "the batch: evaluation takes the mean over all examples."
            )
    check_modes(workload, metrics)
    return {name: tf.ensure_shape(values, [batch]) for name, values in metrics.items()}


def check_modes(workload: Workload, metrics: Mapping[str, Any]) -> None:
    """Raises GraphError if the workload's `mode` names none of its metrics."""
    if unknown := [name for name in workload.mode if name not in metrics]:
        raise errors.GraphError(
            f"workload {workload.name}: mode names {unknown[0]!r}, but its metrics are {', '.join(metrics)}. Name one "
            "of these."
        )


def _sum_of_losses(workload: Workload, outputs: Tensors, labels: Tensors, counted: tf.Tensor) -> tf.Tensor | None:
    """Returns one tower's sum over the examples that count of a loss that is a mean over examples.

    The others repeat the last example, so what they add is known from a batch of nothing else. The loss sees batches of
    one size only, as in training. None for a loss that does not take the outputs of an evaluation, such as one with
    further heads.
    """
    batch, number = int(counted.shape[0]), tf.reduce_sum(tf.cast(counted, tf.int32))

    def repeated(tensor: tf.Tensor) -> tf.Tensor:
        return tf.gather(tensor, tf.fill([batch], tf.maximum(number - 1, 0)))

    try:
        with tf.compat.v1.variable_scope(tf.compat.v1.get_variable_scope(), reuse=tf.compat.v1.AUTO_REUSE):
            mean = towers.batch_loss(workload, outputs, labels)
            last_loss = towers.batch_loss(workload, *tf.nest.map_structure(repeated, (outputs, labels)))
    except Exception:  # of the user's function
        return None
    extra = tf.cast(batch - number, mean.dtype)
    return batch * mean - tf.math.multiply_no_nan(last_loss, extra)
