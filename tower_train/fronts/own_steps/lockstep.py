"""A model's own step in all towers, which wait for each other at each yield."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.own_steps import backward, merges, parts
from tower_train.fronts.own_steps.requests import Join, Loss, Once
from tower_train.fronts.own_steps.tower import Finished, Tower
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables


def run(
    model: keras.Model,
    data,
    devices: Sequence[str],
    merge_device: str,
    apply: Callable[[keras.optimizers.Optimizer, list[GradientsAndVariables]], None],
) -> merges.Logs:
    """Runs `model.tower_step` on consecutive parts of a batch.

    Args:
      model: with all its variables.
      data: a structure of tensors [batch, ...].
      devices: over towers.
      merge_device: device of joined tensors.
      apply: averages towers' gradients, and applies the mean.
    """
    cut = parts.split(data, len(devices))
    towers = [Tower(model, part, device) for part, device in zip(cut, devices, strict=True)]
    answers = [None] * len(towers)
    while True:
        requests = [requested(model, tower.advance(answer)) for tower, answer in zip(towers, answers, strict=True)]
        kind = type(requests[0])
        if any(type(request) is not kind for request in requests):
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step yields different requests in different towers."
            )
        if kind is Join:
            answers = _join(towers, [request.tensors for request in requests], merge_device)
            continue
        updates = []
        if kind is list:
            for losses in zip(*requests, strict=True):
                updates.append((losses[0].optimizer, backward.tower_gradients(towers, losses, merge_device)))
        with tf.device(HOST):
            merges.update_metrics(towers)
            merges.assign(model, towers)
            if kind is Finished:
                return merges.logs(model, towers, [request.logs for request in requests])
            for optimizer, tower_grads in updates:
                apply(optimizer, tower_grads)
            answers = [requests[0].function() if kind is Once else None] * len(towers)
        for tower in towers:
            tower.begin_phase()


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


def _join(towers: Sequence[Tower], structures: Sequence, merge_device: str) -> list:
    """Returns the joined tensors, over towers."""
    own = [[tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(each)] for each in structures]
    if any(tensor.shape.rank == 0 for tensor in own[0]):
        raise errors.ConfigError("tower_step yields a Join of a scalar; join tensors that have a row for each example.")
    with tf.device(merge_device):
        whole = [merges.joined(towers, tensors) for tensors in zip(*own, strict=True)]
    copies = [tower.joined(tensors, whole) for tower, tensors in zip(towers, own, strict=True)]
    return [keras.tree.pack_sequence_as(each, leaves) for each, leaves in zip(structures, copies, strict=True)]
