"""A step's rehearsal on the whole batch, in no tower."""

import inspect
from collections.abc import Iterator

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.requests import Join, Loss, Once, completed
from tower_train.fronts.lockstep.tower import Step
from tower_train.graph.devices import HOST


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
                request = completed(model, generator.send(answer))
        except StopIteration:
            return
        answer = request.tensors if isinstance(request, Join) else None
        answer = request.function() if isinstance(request, Once) else answer
        yield from request if isinstance(request, list) else ()
