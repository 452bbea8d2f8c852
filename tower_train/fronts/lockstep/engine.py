"""A model's step in all towers, which wait for each other at each yield; and its rehearsal in none."""

import inspect
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.exchange import Exchange
from tower_train.fronts.lockstep.meeting import Meeting
from tower_train.fronts.lockstep.requests import Finished, Join, Loss, Once
from tower_train.fronts.lockstep.tower import Step, Tower, TowerScope
from tower_train.graph.devices import HOST


def run(
    model: keras.Model, step: Step, data, devices: Sequence[str], merge_device: str, exchange: Exchange
) -> tuple[Meeting, list]:
    """Runs a step of a model, which has all its variables, on consecutive parts of a batch, of which this process's
    devices compute theirs; towers' tensors are joined on merge_device.

    Returns:
      The towers at the end of the step, and over them what the step returned.
    """
    cut = parts.split(data, len(devices) * exchange.rank, len(devices), len(devices) * exchange.size)
    towers = [Tower(model, step, part, device) for part, device in zip(cut, devices, strict=True)]
    meeting = Meeting(model, towers, exchange, merge_device)
    answers = [None] * len(towers)
    while True:
        asked = [_requested(model, tower.advance(answer)) for tower, answer in zip(towers, answers, strict=True)]
        kind = type(asked[0])
        if any(type(request) is not kind for request in asked):
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step yields different requests in different towers."
            )
        if kind is Join:
            answers = meeting.join([request.tensors for request in asked])
            continue
        by_loss = zip(*asked, strict=True) if kind is list else ()
        updates = [(losses[0].optimizer, meeting.gradients(losses)) for losses in by_loss]
        with tf.device(HOST):
            meeting.update_metrics()
            meeting.assign()
            if kind is Finished:
                return meeting, [request.result for request in asked]
            for optimizer, grads_and_vars in updates:
                optimizer.apply_gradients(grads_and_vars)
            answers = [_once(asked[0], meeting) if kind is Once else None] * len(towers)
        meeting.begin_phase()


def _once(request: Once, meeting: Meeting):
    """Calls the function; what it assigns and returns is what it assigns and returns in the first of all towers."""
    with TowerScope([]) as scope:
        returned = request.function()
    values = [*(value for _, value in scope.assigned.values()), *keras.tree.flatten(returned)]
    of_first = iter(meeting.exchange.first([value for value in values if tf.is_tensor(value)]))
    values = [next(of_first) if tf.is_tensor(value) else value for value in values]
    for (variable, _), value in zip(scope.assigned.values(), values, strict=False):
        variable.assign(value)
    return keras.tree.pack_sequence_as(returned, values[len(scope.assigned) :])


def _requested(model: keras.Model, request) -> Join | Once | Finished | list[Loss]:
    """Checks the requests that a step yields, and completes them; ConfigError for anything else."""
    if isinstance(request, Join | Once | Finished):
        return request
    losses, weights = list(request) if isinstance(request, list | tuple) else [request], model.trainable_weights
    if not losses or not all(isinstance(loss, Loss) for loss in losses):
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step yields {type(request).__name__}; yield a steps.Loss, a list of them, a "
            "steps.Join or a steps.Once."
        )
    return [
        Loss(loss.value, weights if loss.variables is None else list(loss.variables), loss.optimizer or model.optimizer)
        for loss in losses
    ]


def rehearse(model: keras.Model, step: Step, data) -> list[Loss]:
    """Runs a step on a whole batch in a graph of its own: creates the variables of layers, metrics and optimizers;
    returns the losses."""
    losses: list[Loss] = []
    specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data)
    with compat.eager_mode(), tf.device(HOST):  # so that variables have their values now
        with keras.StatelessScope(collect_losses=True), keras.SymbolicScope():
            on_batch = tf.function(lambda batch: losses.extend(_losses(model, step, batch)), autograph=False)
            on_batch.get_concrete_function(specs)
        for optimizer in (loss.optimizer for loss in losses):
            if not optimizer.built:
                trained = {id(v): v for loss in losses if loss.optimizer is optimizer for v in loss.variables}
                optimizer.build(list(trained.values()))
    return losses


def _losses(model: keras.Model, step: Step, batch) -> Iterator[Loss]:
    """Runs a step on a whole batch; yields its losses."""
    generator, answer = step(model, batch), None
    if not inspect.isgenerator(generator):
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step returns {type(generator).__name__}; yield a steps.Loss for each update."
        )

    def refuse(*_, **__):
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step calls apply_gradients, which every tower would do. Yield "
            "steps.Loss(loss, variables, optimizer) instead."
        )

    while True:
        try:
            with compat.replaced(keras.optimizers.Optimizer, "apply_gradients", refuse):
                request = _requested(model, generator.send(answer))
        except StopIteration:
            return
        answer = request.tensors if isinstance(request, Join) else None
        answer = request.function() if isinstance(request, Once) else answer
        yield from request if isinstance(request, list) else ()
