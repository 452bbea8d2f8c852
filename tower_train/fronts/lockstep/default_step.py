"""The steps of a model without a `tower_step`: those of Keras' fit, evaluate and predict."""

import keras

from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.requests import Join, Loss, Once


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
