"""Keras' own steps, on the rows of all towers: a loss of any kind is that of the whole batch."""

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat, parts
from tower_train.fronts.keras_building import features_fault, output_names
from tower_train.fronts.keras_towers.calls import join_batch, once


def train(model: keras.Model, data):
    """Does a step of fit; the loss is computed on the rows of all towers, as on one device."""
    with tf.GradientTape() as tape:
        loss, measure = _loss_of_all(model, data, training=True)
        scaled = model.optimizer.scale_loss(loss)
    weights = model.trainable_weights
    if weights:
        model.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
    return once(measure)


def own(model: keras.Model, data):
    """Does the model's own train_step."""
    return model.train_step(data)


def test(model: keras.Model, data):
    """Does a step of evaluate."""
    _, measure = _loss_of_all(model, data, training=False)
    return once(measure)


def predict(model: keras.Model, data):
    """Does a step of predict, and returns the outputs of all towers."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    _check_features(model, x)
    outputs = model(x, training=False)
    return join_batch(model, x, None, outputs, None, needs_x=False)[2]


def _loss_of_all(model, data, training: bool):
    """Computes the loss; returns it, and a function that updates the metrics and returns their results."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    _check_features(model, x)
    y_pred = model(x, training=training)
    _tell_of_logits(model, y_pred)
    needs_x = compat.is_overridden(model, "compute_loss") or compat.is_overridden(model, "compute_metrics")
    whole_x, *whole = join_batch(model, x, y, y_pred, sample_weight, needs_x)  # Keras' own do not look at x
    loss = compat.compute_loss(model, whole_x, *whole, training=training)
    compat.loss_tracker(model).update_state(loss, sample_weight=tf.convert_to_tensor(parts.batch_size(x)))
    return loss, lambda: model.compute_metrics(whole_x, *whole)


def _check_features(model: keras.Model, x) -> None:
    if fault := features_fault(model, x):
        raise errors.ConfigError(f"multi_gpu_model: {fault}")


_OF_LINEAR = ("MatMul", "BatchMatMulV2", "Conv2D")  # what makes logits; what else an output may end by, may be anything
_BETWEEN = ("Cast", "Identity", "Reshape", "BiasAdd", "AddV2")


def _tell_of_logits(model: keras.Model, y_pred) -> None:
    """Says, once for an output, that a loss takes probabilities and the output for it is one of a linear layer: Keras
    trains that without a word."""
    names, outputs = output_names(model, y_pred), keras.tree.flatten(y_pred)
    losses = model.loss if isinstance(model.loss, dict) else dict.fromkeys(names, model.loss)
    if isinstance(model.loss, (list, tuple)):
        losses = dict(zip(names, model.loss, strict=False))
    for name, output in zip(names, outputs, strict=False):
        loss = losses.get(name)
        loss = keras.losses.get(loss) if isinstance(loss, str) else loss
        kind = getattr(loss, "name", getattr(loss, "__name__", ""))
        op = output.op if isinstance(output, tf.Tensor) and not tf.executing_eagerly() else None
        while op and op.type in _BETWEEN:
            op = op.inputs[0].op
        if op and op.type in _OF_LINEAR and "crossentropy" in kind and not getattr(loss, "from_logits", False):
            console.notice_once(
                model,
                f"*** {model.name}: its output {name} ends without a softmax or sigmoid, but the loss takes "
                "probabilities. Give the loss from_logits=True.",
                kind=f"logits of {name}",
            )
