"""The requests of a model's `tower_step`, all that concerns more than one tower; and Keras' own steps, made of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts


@dataclasses.dataclass(eq=False)
class Loss:
    """Requests an update by the gradient of the whole batch's loss: the towers' mean, weighted by their examples.

    Code after the yield sees the new values. A list of losses is computed on the same weights, and applied in its
    order.

    Attributes:
      value: floating-point scalar, a mean over the tower's examples.
      variables: trainable weights of the model that are trained; None: all of them.
      optimizer: None: the one that the model was compiled with.
    """

    value: tf.Tensor
    variables: Sequence[keras.Variable] | None = None
    optimizer: keras.optimizers.Optimizer | None = None

    def __post_init__(self):
        self.value = tf.convert_to_tensor(self.value)
        if self.value.shape.rank != 0 or not self.value.dtype.is_floating:
            raise errors.ConfigError(
                f"tower_step yields a Loss of {self.value.dtype.name} with shape {self.value.shape}; give a "
                "floating-point scalar: the mean over the tower's examples, such as tf.reduce_mean(losses)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
    """Requests the rows of all towers: the yield gives the tensors of the global batch, in its order.

    Gradients go through it to the towers of the rows.

    Attributes:
      tensors: a tensor [rows, ...] or a structure of them.
    """

    tensors: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Once:
    """Requests that a function is called once and not in every tower, such as one that assigns to variables.

    Code after the yield sees the new values; the yield gives the function's result.

    Attributes:
      function: without arguments; values that it uses are the first tower's, or from a Join.
    """

    function: Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """The end of a step, with what it returned."""

    result: Any


def completed(model: keras.Model, request) -> Join | Once | Finished | list[Loss]:
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


def train(model: keras.Model, data):
    """Does a step of fit; the loss is computed on the rows of all towers, as on one device."""
    loss, measure = yield from _loss_of_all(model, data, training=True)
    yield Loss(loss)
    return (yield Once(measure))


def test(model: keras.Model, data):
    """Does a step of evaluate."""
    _, measure = yield from _loss_of_all(model, data, training=False)
    return (yield Once(measure))


def predict(model: keras.Model, data):
    """Does a step of predict, and returns the outputs of all towers."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return (yield Join(model(x, training=False)))


def _loss_of_all(model, data, training: bool):
    """Computes the loss; returns it, and a function that updates the metrics and returns their results."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=training)
    needs_x = compat.is_overridden(model, "compute_loss") or compat.is_overridden(model, "compute_metrics")
    whole_x, *whole = yield Join((x if needs_x else None, y, y_pred, sample_weight))  # Keras' own do not look at x
    loss = compat.compute_loss(model, whole_x, *whole, training=training)
    compat.loss_tracker(model).update_state(loss, sample_weight=parts.batch_size(x))
    return loss, lambda: model.compute_metrics(whole_x, *whole)
