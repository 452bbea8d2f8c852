"""A rehearsal of a model's own step, in a graph that is thrown away: builds layers and finds what the step needs."""

import inspect

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps import lockstep
from tower_train.fronts.own_steps.requests import Join, Once
from tower_train.graph import random_state

Trained = list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]


def rehearse(model: keras.Model, data, device: str, count: int) -> Trained:
    """Creates the variables of a model's layers and metrics, and notes draws that depend on towers.

    Args:
      model: with the method `tower_step`.
      data: a batch, for its dtypes and shapes.
      device: for the variables.
      count: of towers.

    Returns:
      Over optimizers, all the variables that they train.
    """
    asked = []

    def step(batch):
        asked[:] = _requests(model, batch)

    specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data)
    with tf.device(device), keras.StatelessScope(), keras.SymbolicScope():
        graph = tf.function(step, autograph=False).get_concrete_function(specs).graph
    found = list(random_state.find(graph.get_operations()))
    if found and count > 1:
        console.notice(
            f"{type(model).__name__}.tower_step draws with {found[0].type} ({found[0].line}): other numbers for each "
            "number of towers. keras.random with a keras.random.SeedGenerator draws the same for all."
        )
    trained: dict[int, tuple] = {}
    for request in asked:
        request = lockstep.requested(model, request)
        for loss in request if isinstance(request, list) else []:
            _, variables = trained.setdefault(id(loss.optimizer), (loss.optimizer, []))
            known = {id(variable) for variable in variables}
            variables += [variable for variable in loss.variables if id(variable) not in known]
    return list(trained.values())


def _requests(model: keras.Model, batch) -> list:
    """Runs a step on a whole batch, and returns its requests."""
    generator, asked, answer = model.tower_step(batch), [], None
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
                asked.append(generator.send(answer))
        except StopIteration:
            return asked
        answer = asked[-1].tensors if isinstance(asked[-1], Join) else None
        if isinstance(asked[-1], Once):
            answer = asked[-1].function()
