"""A model's own step in all towers, which wait for each other at each yield."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps import backward, merges, parts
from tower_train.fronts.own_steps.exchange import Exchange, Kind, alone
from tower_train.fronts.own_steps.requests import Join, Loss, Once
from tower_train.fronts.own_steps.tower import Finished, Tower
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables


class Places(NamedTuple):
    """The place that a step runs in.

    Attributes:
      devices: over the towers of all processes; None for those of others.
      merge_device: where the towers' tensors are joined.
      exchange: with other processes.
    """

    devices: Sequence[str | None]
    merge_device: str
    exchange: Exchange = alone


def run(
    model: keras.Model,
    data,
    places: Places,
    apply: Callable[[keras.optimizers.Optimizer, list[GradientsAndVariables]], None],
) -> merges.Logs:
    """Runs `model.tower_step` on consecutive parts of a batch.

    Args:
      model: with all its variables.
      data: a structure of tensors [batch, ...].
      places: of the towers.
      apply: averages towers' gradients, and applies the mean.
    """
    devices, exchange = {i: device for i, device in enumerate(places.devices) if device}, places.exchange
    cut = parts.split(data, list(devices), len(places.devices))
    towers = [Tower(model, part, device) for part, device in zip(cut, devices.values(), strict=True)]
    answers = [None] * len(towers)
    while True:
        requests = [requested(model, tower.advance(answer)) for tower, answer in zip(towers, answers, strict=True)]
        kind = type(requests[0])
        if any(type(request) is not kind for request in requests):
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step yields different requests in different towers."
            )
        if kind is Join:
            answers = _join(towers, [request.tensors for request in requests], places)
            continue
        updates = []
        if kind is list:
            for losses in zip(*requests, strict=True):
                grads = backward.tower_gradients(towers, losses, places.merge_device, exchange)
                updates.append((losses[0].optimizer, grads))
        with tf.device(HOST):
            merges.update_metrics(towers, exchange)
            merges.assign(model, towers, exchange)
            if kind is Finished:
                return merges.logs(model, towers, [request.logs for request in requests], exchange)
            for optimizer, tower_grads in updates:
                apply(optimizer, tower_grads)
            answers = [_once(requests[0], exchange) if kind is Once else None] * len(towers)
        for tower in towers:
            tower.begin_phase()


def _once(request: Once, exchange: Exchange):
    """Calls the function; what it assigns and returns is what it assigns and returns in the chief."""

    def of_chief(value):
        return exchange([(Kind.CHIEFS, value)])[0] if tf.is_tensor(value) else value

    def assign(original, variable, value):
        original(variable, of_chief(tf.convert_to_tensor(value, variable.dtype)))

    if exchange is alone:
        return request.function()
    with compat.intercepted_assignments(assign):
        returned = request.function()
    return keras.tree.map_structure(of_chief, returned)


def requested(model: keras.Model, request) -> Join | Once | Finished | list[Loss]:
    """Checks the requests that a `tower_step` yields, and completes them; ConfigError for anything else."""
    if isinstance(request, Join | Once | Finished):
        return request
    losses = list(request) if isinstance(request, list | tuple) else [request]
    name = type(model).__name__
    if not losses or not all(isinstance(loss, Loss) for loss in losses):
        raise errors.ConfigError(
            f"{name}.tower_step yields {type(request).__name__}; yield a steps.Loss, a list of them, a steps.Join or a "
            "steps.Once."
        )
    return [_complete(model, name, loss) for loss in losses]


def _complete(model: keras.Model, name: str, loss: Loss) -> Loss:
    value = tf.convert_to_tensor(loss.value)
    if value.shape.rank != 0 or not value.dtype.is_floating:
        raise errors.ConfigError(
            f"{name}.tower_step yields a Loss of {value.dtype.name} with shape {value.shape}; give a floating-point "
            "scalar: the mean over the tower's examples, such as tf.reduce_mean(losses)."
        )
    weights = model.trainable_weights
    variables = weights if loss.variables is None else list(loss.variables)
    known = {id(weight) for weight in weights}
    for variable in variables:
        if id(variable) not in known:
            raise errors.ConfigError(
                f"{name}.tower_step yields a Loss for {getattr(variable, 'path', variable)}, which is no trainable "
                "weight of the model. Give keras.Variables of the model, such as self.generator.trainable_weights."
            )
    optimizer = loss.optimizer or model.optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise errors.ConfigError(
            f"{name}.tower_step yields a Loss with the optimizer {optimizer!r}; give a keras.optimizers.Optimizer, or "
            "compile the model with one."
        )
    if not variables:
        raise errors.ConfigError(f"{name}.tower_step yields a Loss without variables to train: all are frozen.")
    return Loss(value, variables, optimizer, loss.examples)


def _join(towers: Sequence[Tower], structures: Sequence, places: Places) -> list:
    """Returns the joined tensors, over towers."""
    own = [[tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(each)] for each in structures]
    if any(tensor.shape.rank == 0 for tensor in own[0]):
        raise errors.ConfigError("tower_step yields a Join of a scalar; join tensors that have a row for each example.")
    with tf.device(places.merge_device):
        whole = merges.joined(towers, list(zip(*own, strict=True)), places.exchange)
    copies = [tower.joined(tensors, whole) for tower, tensors in zip(towers, own, strict=True)]
    return [keras.tree.pack_sequence_as(each, leaves) for each, leaves in zip(structures, copies, strict=True)]
