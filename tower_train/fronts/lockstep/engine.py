"""A model's step in all towers, which wait for each other at each yield; and its rehearsal in none."""

import inspect
from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts, requests
from tower_train.fronts.lockstep.exchange import Exchange
from tower_train.fronts.lockstep.meeting import Meeting
from tower_train.fronts.lockstep.requests import Finished, Join, Loss, Once
from tower_train.fronts.lockstep.tower import Step, Tower, TowerScope
from tower_train.graph import random_state
from tower_train.graph.devices import HOST

_BRANCHES = ("Case", "If", "StatelessCase", "StatelessIf")  # are traced in each tower, and draw once a step


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
    meeting = Meeting(model, towers, exchange, merge_device, is_own(step))
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


def is_own(step: Step) -> bool:
    """Returns whether a program wrote a step."""
    return step not in (requests.train, requests.test, requests.predict)


def _once(request: Once, meeting: Meeting):
    """Calls the function; what it assigns and returns is what it assigns and returns in the first of all towers."""
    with TowerScope([]) as scope:
        returned = request.function()
    values = [*(value for _, value in scope.assigned.values()), *keras.tree.flatten(returned)]
    of_first = iter(meeting.firsts([value for value in values if tf.is_tensor(value)]))
    values = [next(of_first) if tf.is_tensor(value) else value for value in values]
    for (variable, _), value in zip(scope.assigned.values(), values, strict=False):
        variable.assign(value)
    return keras.tree.pack_sequence_as(returned, values[len(scope.assigned) :])


def _requested(model: keras.Model, request) -> Join | Once | Finished | list[Loss]:
    """Checks the requests that a step yields, and completes them; ConfigError for anything else."""
    if isinstance(request, Join | Once | Finished):
        return request
    losses, weights = list(request) if isinstance(request, list | tuple) else [request], model.trainable_weights
    yields, completed = f"{type(model).__name__}.tower_step yields", []
    if not losses or not all(isinstance(loss, Loss) for loss in losses):
        raise errors.ConfigError(
            f"{yields} {type(request).__name__}; yield a steps.Loss, a list of them, a steps.Join or a steps.Once."
        )
    for loss in losses:
        value, variables = tf.convert_to_tensor(loss.value), loss.variables
        variables = weights if variables is None else list(variables)
        if value.shape.rank != 0 or not value.dtype.is_floating:
            raise errors.ConfigError(
                f"{yields} a Loss of {value.dtype.name} with shape {value.shape}; give a floating-point scalar: the "
                "mean over the tower's examples, such as tf.reduce_mean(losses)."
            )
        completed.append(Loss(value, variables, loss.optimizer or model.optimizer))
    return completed


def rehearse(
    model: keras.Model, step: Step, data, count: int, losses: list[tf.Tensor] | None = None
) -> list[keras.optimizers.Optimizer]:
    """Runs a step on a whole batch in a graph that is thrown away: creates the variables of layers, metrics and
    optimizers, which it returns, and notes draws that depend on the `count` of towers. `losses` gets the values of the
    step's losses in the graph."""
    trained: dict[int, tuple[keras.optimizers.Optimizer, dict]] = {}
    specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data)
    with compat.eager_mode(), tf.device(HOST):  # so that variables have their values now
        with keras.StatelessScope(collect_losses=True), keras.SymbolicScope():
            on_batch = tf.function(lambda batch: _note_losses(model, step, batch, trained, losses), autograph=False)
            graph = on_batch.get_concrete_function(specs).graph
        for optimizer, variables in trained.values():
            if not optimizer.built:
                optimizer.build(list(variables.values()))
    drawing = [op for op in random_state.find(graph.get_operations()) if not _draws_alike(op)]
    if drawing and count > 1:
        name = f"{type(model).__name__}.tower_step" if is_own(step) else model.name
        console.notice(
            f"{name} draws with {drawing[0].type} ({drawing[0].line}): other numbers for each number of towers. "
            "normal, truncated_normal, uniform and dropout of keras.random draw the same for all, and those of "
            "tf.random outside of loops and tf.functions."
        )
    return [optimizer for optimizer, _ in trained.values()]


def _draws_alike(op: random_state.StatefulOp) -> bool:
    """Returns whether all numbers of towers draw the same: of examples, or a fixed size that is everyone's."""
    return op.type in compat.DRAWS_OF_TENSORFLOW and op.caller in (op.type, *_BRANCHES)


def _note_losses(model: keras.Model, step: Step, batch, trained: dict, values: list | None) -> None:
    """Runs a step on a whole batch; notes by optimizers' ids those of its losses, and the variables that they train;
    and the losses' values."""
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
        for loss in request if isinstance(request, list) else ():
            _, variables = trained.setdefault(id(loss.optimizer), (loss.optimizer, {}))
            variables.update({id(variable): variable for variable in loss.variables})
            if values is not None:
                values.append(loss.value)
