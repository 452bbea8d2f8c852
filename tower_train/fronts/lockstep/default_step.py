"""The steps of a model without a `tower_step`: those of Keras' fit, evaluate and predict."""

import keras

from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.requests import Join, Loss


def train(model: keras.Model, data):
    """Does a step of fit; the loss is computed on the rows of all towers, as on one device."""
    loss, results = yield from _loss_and_metrics(model, data, training=True)
    yield Loss(loss)
    return results


def test(model: keras.Model, data):
    """Does a step of evaluate."""
    _, results = yield from _loss_and_metrics(model, data, training=False)
    return results


def predict(model: keras.Model, data):
    """Does a step of predict, and returns the outputs of all towers."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return (yield Join(model(x, training=False)))


def _loss_and_metrics(model, data, training: bool):
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=training)
    whole_x = x if compat.is_overridden(model, "compute_loss") else None  # Keras' own does not look at it
    whole_x, *whole = yield Join((whole_x, y, y_pred, sample_weight))
    loss = compat.compute_loss(model, whole_x, *whole, training=training)
    compat.loss_tracker(model).update_state(loss, sample_weight=parts.batch_size(x))
    return loss, model.compute_metrics(x, y, y_pred, sample_weight)
