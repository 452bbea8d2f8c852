"""Runs one Keras model on several devices, each on its share of a batch; the model's variables stay as they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train.fronts import compat, growth, keras_variables
from tower_train.graph.devices import HOST


@dataclasses.dataclass(frozen=True)
class Replica:
    """The model's results on one device.

    Attributes:
      device: the device; None if another process runs it.
      size: int32 scalar, the number of its examples.
      share: float scalar, its part of the batch's examples; 0 if there were fewer than replicas.
      outputs: of its own examples, structured as the model's.
      added_losses: over its layers' calls of add_loss, scalars.
      assigned: {index in assignable(model): the value that its layers assigned}.
    """

    device: str | None
    size: tf.Tensor
    share: tf.Tensor
    outputs: Any = None
    added_losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    assigned: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    _tape: tf.GradientTape | None = None
    _weights: list[tf.Tensor] | None = None

    @property
    def is_here(self) -> bool:
        """True if this process runs it."""
        return self.device is not None

    @property
    def differentiable(self) -> list[tf.Tensor]:
        """The tensors through which a loss of the whole batch depends on this replica."""
        tensors = [*keras.tree.flatten(self.outputs), *self.added_losses]
        return [tensor for tensor in tensors if tensor is not None and tensor.dtype.is_floating]

    def gradients(self, output_gradients: list[tf.Tensor | None]) -> list:
        """Carries the gradients of `differentiable` back to the trainable weights; None for a weight without one."""
        reached = [pair for pair in zip(self.differentiable, output_gradients, strict=True) if pair[1] is not None]
        if not reached:
            return [None] * len(self._weights)
        with tf.device(self.device):
            return self._tape.gradient([y for y, _ in reached], self._weights, [grad for _, grad in reached])


def run(model: keras.Model, x, devices: Sequence[str | None], training: bool) -> list[Replica]:
    """Runs a model on consecutive parts of a batch whose sizes differ by one at most.

    A replica without examples gets a copy of the last one, since not every op accepts none, but returns no outputs for
    it.

    Args:
      model: the model; it must have its variables already.
      x: its input, a tensor [batch, ...] or a structure of them.
      devices: over replicas, a device string; None for one that another process runs, which has no results here.
      training: as for the model's call.
    """
    batch = batch_size(x)
    replicas, begin = [], 0
    for i, device in enumerate(devices):
        size = (batch + len(devices) - 1 - i) // len(devices)
        with tf.device(HOST):
            first = tf.minimum(begin, batch - 1)
            own = growth.rows(x, slice(first, first + tf.maximum(size, 1))) if len(devices) > 1 else x
            share = tf.cast(size / batch, keras.config.floatx())
        with tf.device(device), tf.name_scope(f"tower_{i}"):
            results = _forward(model, own, i, training, size) if device else ()
            replicas.append(Replica(device, size, share, *results))
        begin += size
    return replicas


def batch_size(x) -> tf.Tensor:
    """Returns an int32 scalar, the number of examples in a structure of tensors."""
    return tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]


def merge(replicas: list[Replica]):
    """Joins the outputs, and Keras' masks, for the whole batch."""
    if len(replicas) == 1:
        return replicas[0].outputs

    def joined(*parts):
        whole = tf.concat(parts, axis=0)
        masks = [compat.mask_of(part) for part in parts]
        if None not in masks:
            compat.set_mask(whole, tf.concat(masks, axis=0))
        return whole

    return keras.tree.map_structure(joined, *[replica.outputs for replica in replicas])


def assignable(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that a call of the model may change: its own, and those of its layers' metrics."""
    return [*model.variables, *(v for metric in compat.layer_metrics(model) for v in metric.variables)]


def find_growth(model: keras.Model, replicas: list[Replica], x, training: bool) -> growth.Growth:
    """Finds how results besides outputs grow with the examples, by a trial if needed; ConfigError if that fails."""
    variables = assignable(model)
    known = {id(variable) for variable in compat.moving_statistics_of(model)}
    tried = next(replica for replica in replicas if replica.is_here)
    assigned = [v for i, v in enumerate(variables) if i in tried.assigned and not compat.is_seed_state(v)]
    assigned = [variable for variable in assigned if id(variable) not in known]
    if len(replicas) == 1 or not (tried.added_losses or assigned):
        return growth.Growth((0,) * len(tried.added_losses))
    with tf.device(tried.device):
        return growth.find(model, variables, x, training)


def merge_losses(replicas: list[Replica], found: growth.Growth) -> list[tf.Tensor]:
    """Computes the losses that layers added, for the whole batch."""
    whole = []
    for k, power in enumerate(found.losses):
        losses = [replica.added_losses[k] for replica in replicas]
        checks = []
        if power is None:
            message = (
                f"multi_gpu_model: the layer {found.layers[k]!r} gave 0 to add_loss when it was tried, so that a sum "
                "could not be told from a mean. Call compile() again now that it gives other numbers."
            )
            checks = [tf.debugging.assert_equal(tf.add_n(losses), tf.zeros([], losses[0].dtype), message)]
        with tf.control_dependencies(checks):
            whole.append(_merged(replicas, losses, power or 0))
    return whole


def assign_merged(model: keras.Model, replicas: list[Replica], found: growth.Growth) -> None:
    """Assigns the replicas' values to the model's variables: the mean over examples to floating-point variables such as
    moving averages, the sum of the changes to counts, the first replica's value to others such as seed states."""
    for i, variable in enumerate(assignable(model)):
        if i in replicas[0].assigned:
            values, power = [replica.assigned[i] for replica in replicas], found.variables.get(i, 0)
            if power:
                changes = [value - variable.value for value in values]
                variable.assign_add(_merged(replicas, changes, power))
            elif values[0].dtype.is_floating:
                variable.assign(_merged(replicas, values, 0))
            else:
                variable.assign(values[0])


def _merged(replicas: list[Replica], values: list[tf.Tensor], power: int) -> tf.Tensor:
    if len(replicas) == 1:
        return values[0]
    of_replicas = growth.weights([replica.share for replica in replicas], power)
    return tf.add_n([tf.cast(w, v.dtype) * v for w, v in zip(of_replicas, values, strict=True)])


def _forward(model: keras.Model, x, index: int, training: bool, size: tf.Tensor):
    """Calls the model on copies of its variables; returns the attributes of a Replica from outputs on. The tape watched
    the copies of the trainable variables."""
    weights = [tf.identity(variable.value) for variable in model.trainable_weights]
    before = {id(v): value for v, value in zip(model.trainable_weights, weights, strict=True)}
    before |= keras_variables.tower_seeds(model.variables, [v.value for v in model.variables], index)
    copies = [(v, before[id(v)]) for v in model.variables if id(v) in before]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        with keras.StatelessScope(copies, collect_losses=True) as scope:
            outputs = model(x, training=training)
        outputs = keras.tree.map_structure(lambda y: _first_rows(y, size), outputs)
        added_losses = [tf.reduce_sum(_floating(loss)) for loss in scope.losses]
    variables = assignable(model)
    now = {i: scope.get_current_value(variable) for i, variable in enumerate(variables)}
    assigned = {i: now[i] for i, variable in enumerate(variables) if now[i] is not before.get(id(variable))}
    return outputs, added_losses, assigned, tape, weights


def _floating(loss: tf.Tensor) -> tf.Tensor:
    return loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())


def _first_rows(y: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    rows, mask = y[:size], compat.mask_of(y)
    if mask is not None:
        compat.set_mask(rows, mask[:size])
    return rows
