"""Whatever form compile() is given, the history of a model of multi_gpu_model is that of the same model in Keras."""

import keras
import numpy as np
import pytest
from keras_twins import CROSS_ENTROPY, assert_same, fit_both, twins

import tower_train

layers = keras.layers
rng = np.random.default_rng(0)
x = rng.normal(size=[10, 4]).astype("float32")
of_a, of_b = rng.normal(size=[10, 1]).astype("float32"), rng.integers(0, 3, 10)
of_c = rng.normal(size=[10, 2]).astype("float32")
weights = rng.uniform(size=10).astype("float32")


def heads(join):
    """A functional model whose outputs are a structure of three layers' outputs."""

    def build():
        inputs = keras.Input([4])
        hidden = layers.Dense(5, "tanh")(inputs)
        return keras.Model(
            inputs, join(*(layers.Dense(n, name=name)(hidden) for n, name in [(1, "a"), (3, "b"), (2, "c")]))
        )

    return build


ONE, PAIR = heads(lambda a, b, c: b), heads(lambda a, b, c: [a, b])
NESTED = heads(lambda a, b, c: {"p": {"a": a}, "q": [b, c]})


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(1), layers.Dense(3)

    def call(self, inputs):
        return {"a": self.first(inputs), "b": self.second(inputs)}


PAIRS = {"a": of_a, "b": of_b}
LOSSES = {"a": "mse", "b": CROSS_ENTROPY}
FORMS = {
    "lists": (
        PAIR,
        {"loss": ["mse", CROSS_ENTROPY], "loss_weights": [0.1, 2.0], "metrics": [["mae"], ["accuracy"]]},
        (of_a, of_b),
    ),
    "metrics as objects, one twice": (
        PAIR,
        lambda: {
            "loss": LOSSES,
            "metrics": {
                "a": ["mae", keras.metrics.MeanAbsoluteError(name="mae")],
                "b": [keras.metrics.SparseTopKCategoricalAccuracy(2)],
            },
            "weighted_metrics": {"a": ["mae"]},
        },
        PAIRS,
    ),
    "nested outputs": (
        NESTED,
        {
            "loss": {"p": {"a": "mse"}, "q": [CROSS_ENTROPY, "mse"]},
            "metrics": {"p": {"a": ["mae"]}, "q": [["accuracy"], ["mae"]]},
        },
        {"p": {"a": of_a}, "q": [of_b, of_c]},
    ),
    "a subclass with a dictionary": (Subclassed, {"loss": LOSSES, "metrics": {"b": ["accuracy"]}}, PAIRS),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_history_and_the_training_are_those_of_keras(form):
    build, settings, y = FORMS[form]
    trained = fit_both(build, 2, settings, x, y, batch_size=4, validation_data=(x, y))
    assert_same(trained, 1e-5)
    [(_, expected), (_, history)] = trained
    assert list(history.history) == list(expected.history)


def test_with_weights_of_samples(float64):
    weighted = {"loss": CROSS_ENTROPY, "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    assert_same(fit_both(ONE, 2, weighted, x, of_b, batch_size=4, epochs=2, sample_weight=weights), 1e-12)
    by_output = {"loss": list(LOSSES.values()), "metrics": [["mae"], None], "weighted_metrics": [["mae"], ["accuracy"]]}
    of_outputs = {"sample_weight": [weights, weights[::-1]]}
    assert_same(fit_both(PAIR, 2, by_output, x, [of_a, of_b], batch_size=4, epochs=2, **of_outputs), 1e-12)


@pytest.mark.parametrize("settings", [{"loss": {"a": "mse", "z": "mse"}}, {"loss": LOSSES, "metrics": {"z": "mae"}}])
def test_a_name_of_no_output_is_refused_in_keras_words(settings):
    texts = []
    one, template = twins(PAIR)
    for model in (one, tower_train.multi_gpu_model(template, gpus=2)):
        with pytest.raises(ValueError) as caught:
            model.compile("sgd", **settings)
            model.fit(x, PAIRS, verbose=0)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_evaluate_gives_the_values_in_keras_order():
    one, template = twins(PAIR)
    found = []
    for model in (one, tower_train.multi_gpu_model(template, gpus=2)):
        model.compile("sgd", LOSSES, metrics={"a": ["mae"], "b": ["accuracy"]})
        found.append(model.evaluate(x, PAIRS, batch_size=4, verbose=0))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
