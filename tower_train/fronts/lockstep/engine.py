"""A model's step in all towers, which wait for each other at each yield; and its rehearsal in none."""

import inspect
import itertools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import backward, parts
from tower_train.fronts.lockstep.exchange import Exchange, Merge, alone
from tower_train.fronts.lockstep.meeting import Meeting
from tower_train.fronts.lockstep.requests import Finished, Join, Loss, Once
from tower_train.fronts.lockstep.tower import Step, Tower
from tower_train.fronts.lockstep.tower_call import TowerScope
from tower_train.graph import random_state
from tower_train.graph.devices import HOST

Trained = list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]


def run(
    model: keras.Model, step: Step, data, devices: Sequence[str | None], merge_device: str, exchange: Exchange = alone
) -> tuple[Meeting, list]:
    """Runs a model's step on consecutive parts of a batch.

    Args:
      model: with all its variables.
      step: (model, data) -> its requests; the model's `tower_step` or one of `default_step`.
      data: a structure of tensors [batch, ...].
      devices: over the towers of all processes; None for those of others.
      merge_device: where the towers' tensors are joined.
      exchange: with other processes.

    Returns:
      The towers at the end of the step, and over them what the step returned.
    """
    here = {i: device for i, device in enumerate(devices) if device}
    cut = parts.split(data, list(here), len(devices))
    towers = [Tower(model, step, part, device) for part, device in zip(cut, here.values(), strict=True)]
    meeting = Meeting(model, towers, exchange, merge_device, is_own(step))
    answers = [None] * len(towers)
    while True:
        requests = [_requested(model, tower.advance(answer)) for tower, answer in zip(towers, answers, strict=True)]
        kind = type(requests[0])
        if any(type(request) is not kind for request in requests):
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step yields different requests in different towers."
            )
        if kind is Join:
            answers = meeting.join([request.tensors for request in requests])
            continue
        by_loss = zip(*requests, strict=True) if kind is list else ()
        updates = [(losses[0].optimizer, backward.batch_gradients(meeting, losses)) for losses in by_loss]
        with tf.device(HOST):
            meeting.update_metrics()
            meeting.assign()
            if kind is Finished:
                return meeting, [request.result for request in requests]
            for optimizer, grads_and_vars in updates:
                optimizer.apply_gradients(grads_and_vars)
            # Keras' own steps do once what is the same in all processes.
            shared = exchange if is_own(step) else alone
            answers = [_once(requests[0], shared) if kind is Once else None] * len(towers)
        for tower in towers:
            tower.begin_phase()


def is_own(step: Step) -> bool:
    """Returns whether a step is a method that a program wrote."""
    return step.__name__ == "tower_step"


def _once(request: Once, exchange: Exchange):
    """Calls the function; what it assigns and returns is what it assigns and returns in the chief."""
    if exchange is alone:
        return request.function()
    with TowerScope([]) as scope:
        returned = request.function()
    flat = keras.tree.flatten(returned)
    values = [*(value for _, value in scope.assigned.values()), *flat]
    wholes = iter(exchange([(Merge.CHIEFS, value) for value in values if tf.is_tensor(value)]))
    for variable, _ in scope.assigned.values():
        variable.assign(next(wholes))
    return keras.tree.pack_sequence_as(returned, [next(wholes) if tf.is_tensor(each) else each for each in flat])


def _requested(model: keras.Model, request) -> Join | Once | Finished | list[Loss]:
    """Checks the requests that a step yields, and completes them; ConfigError for anything else."""
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
        raise errors.ConfigError(f"{name} has no variables to train in this step: all are frozen.")
    return Loss(value, variables, optimizer)


def rehearse(model: keras.Model, step: Step, data, count: int) -> Trained:
    """Runs a step on a whole batch in a graph that is thrown away: creates the variables of layers and metrics, and
    notes draws that depend on towers.

    Args:
      model: of the step.
      step: as for `run`.
      data: a batch, for its dtypes and shapes.
      count: of towers.

    Returns:
      Over optimizers, all the variables that they train.
    """
    requests = []
    specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data)
    # Eagerly, so that variables have their values now.
    with compat.eager_mode(), tf.device(HOST), keras.StatelessScope(), keras.SymbolicScope():
        graph = (
            tf.function(lambda batch: requests.extend(_requests(model, step, batch)), autograph=False)
            .get_concrete_function(specs)
            .graph
        )
    drawing = list(random_state.find(graph.get_operations()))
    if drawing and count > 1:
        name = f"{type(model).__name__}.tower_step" if is_own(step) else model.name
        console.notice(
            f"{name} draws with {drawing[0].type} ({drawing[0].line}): other numbers for each number of towers. "
            "keras.random with a keras.random.SeedGenerator draws the same for all."
        )
    trained: dict[int, tuple] = {}
    of_losses = (_requested(model, request) for request in requests if not isinstance(request, Join | Once))
    for loss in itertools.chain(*of_losses):
        _, variables = trained.setdefault(id(loss.optimizer), (loss.optimizer, {}))
        variables.update({id(variable): variable for variable in loss.variables})
    return [(optimizer, list(variables.values())) for optimizer, variables in trained.values()]


def _requests(model: keras.Model, step: Step, batch) -> list:
    """Runs a step on a whole batch, and returns its requests."""
    generator, requests, answer = step(model, batch), [], None
    if not inspect.isgenerator(generator):
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step returns {type(generator).__name__}; yield a steps.Loss for each update."
        )

    def refuse(*args, **kwargs):
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step calls apply_gradients, which every tower would do. Yield "
            "steps.Loss(loss, variables, optimizer) in place of the gradients and their use."
        )

    while True:
        try:
            with compat.replaced(keras.optimizers.Optimizer, "apply_gradients", refuse):
                requests.append(generator.send(answer))
        except StopIteration:
            return requests
        request = requests[-1]
        answer = request.tensors if isinstance(request, Join) else None
        answer = request.function() if isinstance(request, Once) else answer
