"""In towers, losses added as means, activity regularizers and layers' metrics are those of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_twins import CROSS_ENTROPY, assert_same, data, fit_both

layers, ops = keras.layers, keras.ops


class Adds(layers.Layer):
    """Adds function(inputs) to the loss."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


class Measures(layers.Layer):
    """Updates a metric with function(inputs)."""

    def __init__(self, function, metric):
        super().__init__()
        self.function, self.measured = function, metric

    def call(self, inputs):
        self.measured.update_state(self.function(inputs))
        return inputs


class MeasuringModel(Measures, keras.Model):
    """Measures, but not in the history of a model around it."""


def network(*middle):
    """Builds a network with the layers that `middle` makes between its two dense ones."""
    return lambda: keras.Sequential(
        [keras.Input([4]), layers.Dense(5, "tanh"), *(make() for make in middle), layers.Dense(3)]
    )


ADDED = [
    lambda x: 0.1 * ops.mean(x**2), lambda x: [ops.mean(x**2), ops.mean(ops.abs(x))], lambda x: 0 * ops.mean(x) + 7,
]  # fmt: skip
SETTINGS = {"optimizer": "sgd", "loss": CROSS_ENTROPY}


def fit_uneven(gpus, *middle, **kwargs):
    """Trains both twins for 12 steps, of which every third has a batch that towers cannot share out evenly."""
    x, y = data(11, 4)
    return fit_both(network(*middle), gpus, SETTINGS, x, y, batch_size=4, epochs=4, **kwargs)


def test_an_added_loss_is_that_of_the_whole_batch(float64):
    assert_same(fit_uneven(3, *(lambda function=function: Adds(function) for function in ADDED)), 1e-12)


def test_added_losses_may_be_all(float64):
    x, _ = data(11, 4)
    assert_same(fit_both(network(lambda: Adds(ADDED[0])), 2, {"optimizer": "sgd"}, x, batch_size=4, epochs=2), 1e-12)


def test_regularizers_of_activities_and_of_weights(float64):
    def dense(regularizer):
        return layers.Dense(5, activity_regularizer=regularizer, kernel_regularizer="l2", bias_regularizer="l1")

    regularizers = ["l2", lambda y: 0.01 * ops.sum(y) * ops.shape(y)[1]]
    assert_same(fit_uneven(3, *(lambda r=r: dense(r) for r in regularizers)), 1e-12)


def test_nested_outputs_with_weights_of_losses_and_samples_and_metrics_by_name(float64):
    def build():
        inputs = keras.Input([4])
        a, b, c = (layers.Dense(n, name=name)(inputs) for n, name in [(1, "a"), (3, "b"), (2, "c")])
        return keras.Model(inputs, {"p": {"a": a}, "q": [b, c]})

    def like(a, b, c):
        return {"p": {"a": a}, "q": [b, c]}

    settings = {"loss": like("mse", CROSS_ENTROPY, "mse"), "loss_weights": like(0.1, 2.0, 1.0),
                "metrics": like(["mae"], ["accuracy"], ["mae"]), "weighted_metrics": like(["mae"], [], [])}  # fmt: skip
    x, of_b = data(10, 4)
    y, weights = like(x[:, :1], of_b, x[:, :2]), like(*(np.abs(x[:, i]) for i in range(3)))
    given = dict(batch_size=4, epochs=2, sample_weight=weights, validation_data=(x, y))
    trained = fit_both(build, 2, settings, x, y, **given)
    assert_same(trained, 1e-12)
    [(_, expected), (_, history)] = trained
    assert list(history.history) == list(expected.history)


def test_a_loss_of_chosen_examples_whose_gradient_is_sparse(float64):
    def of_the_last(y_true, y_pred):
        return CROSS_ENTROPY(y_true[-3:], tf.gather(y_pred, [-3, -2, -1] + tf.shape(y_pred)[0]))

    x, y = data(8, 4)
    assert_same(fit_both(network(), 3, {"optimizer": "sgd", "loss": of_the_last}, x, y, batch_size=8), 1e-12)


CROSS_ENTROPIES = {
    "sparse_categorical_crossentropy": ("softmax", lambda labels: labels),
    "binary_crossentropy": ("sigmoid", lambda labels: np.eye(3)[labels]),
}


@pytest.mark.parametrize("loss", CROSS_ENTROPIES)
def test_crossentropies_of_saturated_outputs_are_computed_of_their_logits(float64, loss):
    """As of pixels that are not scaled: outputs are 0 and 1, and only their logits have gradients."""
    activation, labels = CROSS_ENTROPIES[loss]

    def build():
        hidden = [layers.Dense(16, "relu"), layers.Dense(3, activation)]
        return keras.Sequential([keras.Input([6, 6, 2]), layers.Flatten(), *hidden])

    x, y = data(50, 6, 6, 2)
    x, y = 255 * np.abs(x), labels(y)
    # Not categorical accuracy of sigmoids, of which several are 1 but for their last bits.
    accuracy = "binary_accuracy" if activation == "sigmoid" else "accuracy"
    settings = {"optimizer": "adam", "loss": loss, "metrics": [accuracy, loss]}
    assert_same(fit_both(build, 2, settings, x, y, batch_size=16, epochs=6), 1e-9)


def test_a_metric_that_a_layer_updates_is_that_of_the_whole_batch(float64):
    measured = {"vector": lambda x: ops.sum(x**2, axis=-1), "largest": lambda x: ops.max(x, axis=1)}
    means = (lambda name=name: Measures(measured[name], keras.metrics.Mean(name=name)) for name in measured)
    trained = fit_uneven(3, *means, lambda: MeasuringModel(ops.square, keras.metrics.Sum()))
    assert_same(trained, 1e-12)
    ours, keras_own = (float(model.layers[-2].measured.result()) for model, _ in trained[::-1])
    assert ours == pytest.approx(keras_own, rel=1e-12)
    assert {*measured} <= trained[1][1].history.keys()
