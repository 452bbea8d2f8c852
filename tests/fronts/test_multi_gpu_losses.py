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


def network(middle=list):
    """Builds a network with the layers that `middle` makes between its two dense ones."""
    return lambda: keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), *middle(), layers.Dense(3)])


ADDED = [
    lambda x: 0.1 * ops.mean(x**2),
    lambda x: [ops.mean(x**2), ops.mean(ops.abs(x))],
    lambda x: 0 * ops.mean(x) + 7,
]
OF_ACTIVITIES = ["l2", lambda y: 0.01 * ops.sum(y) * ops.shape(y)[1]]
MEASURED = {"vector": lambda x: ops.sum(x**2, axis=-1), "largest": lambda x: ops.max(x, axis=1)}


def test_added_losses_regularizers_and_metrics_of_layers_are_those_of_the_whole_batch(float64):
    """In 12 steps, of which every third has a batch that towers cannot share out evenly."""

    def middle():
        of_weights = {"kernel_regularizer": "l2", "bias_regularizer": "l1"}
        return [
            *(Adds(function) for function in ADDED),
            *(layers.Dense(5, activity_regularizer=each, **of_weights) for each in OF_ACTIVITIES),
            *(Measures(function, keras.metrics.Mean(name=name)) for name, function in MEASURED.items()),
            MeasuringModel(ops.square, keras.metrics.Sum()),
        ]

    settings = {"optimizer": "sgd", "loss": CROSS_ENTROPY}
    trained = fit_both(network(middle), 3, settings, *data(11, 4), batch_size=4, epochs=4)
    assert_same(trained, 1e-12)
    ours, keras_own = (float(model.layers[-2].measured.result()) for model, _ in trained[::-1])
    assert ours == pytest.approx(keras_own, rel=1e-12)
    assert {*MEASURED} <= trained[1][1].history.keys()


def test_added_losses_may_be_all(float64):
    x, _ = data(11, 4)
    build = network(lambda: [Adds(ADDED[0])])
    assert_same(fit_both(build, 2, {"optimizer": "sgd"}, x, batch_size=4, epochs=2), 1e-12)


def test_nested_outputs_with_weights_of_losses_and_samples_and_metrics_by_name(float64):
    def build():
        inputs = keras.Input([4])
        a, b, c = (layers.Dense(n, name=name)(inputs) for n, name in [(1, "a"), (3, "b"), (2, "c")])
        return keras.Model(inputs, {"p": {"a": a}, "q": [b, c]})

    def like(a, b, c):
        return {"p": {"a": a}, "q": [b, c]}

    settings = {
        "loss": like("mse", CROSS_ENTROPY, "mse"),
        "loss_weights": like(0.1, 2.0, 1.0),
        "metrics": like(["mae"], ["accuracy"], ["mae"]),
        "weighted_metrics": like(["mae"], [], []),
    }
    x, of_b = data(10, 4)
    y, weights = like(x[:, :1], of_b, x[:, :2]), like(*(np.abs(x[:, i]) for i in range(3)))
    given = dict(batch_size=4, epochs=2, sample_weight=weights, validation_data=(x, y), is_eager=False)
    trained = fit_both(build, 2, settings, x, y, **given)
    assert_same(trained, 1e-12)
    [(_, expected), (_, history)] = trained
    assert list(history.history) == list(expected.history)


def test_a_loss_of_chosen_examples_whose_gradient_is_sparse(float64):
    def of_the_last(y_true, y_pred):
        return CROSS_ENTROPY(y_true[-3:], tf.gather(y_pred, [-3, -2, -1] + tf.shape(y_pred)[0]))

    x, y = data(8, 4)
    assert_same(fit_both(network(), 3, {"optimizer": "sgd", "loss": of_the_last}, x, y, batch_size=8), 1e-12)


def test_crossentropies_of_saturated_outputs_are_computed_of_their_logits(float64):
    """As of pixels that are not scaled: outputs are 0 and 1, and only their logits have gradients."""

    def build():
        hidden = [layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
        return keras.Sequential([keras.Input([6, 6, 2]), layers.Flatten(), *hidden])

    x, y = data(50, 6, 6, 2)
    loss = "sparse_categorical_crossentropy"
    settings = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy", loss]}
    assert_same(fit_both(build, 2, settings, 255 * np.abs(x), y, batch_size=16, epochs=3), 1e-9)
