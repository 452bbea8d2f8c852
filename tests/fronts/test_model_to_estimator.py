"""model_to_estimator trains what Keras' own fit trains, and leaves the Keras model as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train import estimator as tf_estimator

layers = keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=[24, 5, 5, 1]).astype(np.float32)
LABELS = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 24)]


def dataset(x, y, batch, epochs=1):
    """An input_fn."""
    return lambda: tf.data.Dataset.from_tensor_slices((x, y)).repeat(epochs).batch(batch)


def network():
    keras.utils.set_random_seed(3)
    adapted = layers.Normalization()
    adapted.adapt(X)
    return keras.Sequential(
        [
            keras.Input([5, 5, 1]),
            adapted,
            layers.Normalization(mean=0.1, variance=1.5),
            layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(momentum=0.5),
            layers.Flatten(),
            layers.Dropout(0.3, seed=1),  # drawn for the joined batch
            layers.SpectralNormalization(layers.Dense(3, activation="softmax")),
        ]
    )


def compiled(model, optimizer="adam"):
    """To be trained eagerly by Keras, as a few steps take less time than to trace the model's functions."""
    model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"], run_eagerly=True)
    return model


def make(model, model_dir, towers):
    return tf_estimator.model_to_estimator(model, model_dir=model_dir, config=tf_estimator.RunConfig(num_gpus=towers))


def assert_same_weights(estimator, model, atol=1e-5):
    for variable in model.weights:
        np.testing.assert_allclose(
            estimator.get_variable_value(variable.path), variable.numpy(), atol=atol, err_msg=variable.path
        )


def test_training_moving_averages_and_metrics_are_keras_own_in_later_optimizers_of_a_program_too(tmp_path):
    """Towers meet within the normalising layer, whose name the optimizer's variables must not get."""
    keras.optimizers.SGD()  # Keras numbers the optimizers of a program
    model = compiled(network(), keras.optimizers.SGD(0.01, 0.9))
    before = model.get_weights()
    for steps in (4, 2):  # it ends and goes on, with the optimizer's state
        estimator = make(model, tmp_path, 2)
        estimator.train(lambda steps=steps: dataset(X, LABELS, 2)().skip(0 if steps == 4 else 8), steps=steps)
    assert estimator.get_variable_value("sgd/iteration") == estimator.get_variable_value("global_step") == 6
    for value, unchanged in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, unchanged)
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0)  # it still can be trained
    assert_same_weights(estimator, model)
    paths = [variable.path.replace(model.optimizer.name, "sgd") for variable in model.optimizer.variables]
    assert {*estimator.get_variable_names()} == {*paths, *(each.path for each in model.variables), "global_step"}
    found = estimator.evaluate(dataset(X, LABELS, 10))
    assert found.keys() == {"accuracy", "loss", "global_step"}
    assert found["accuracy"] == pytest.approx(model.evaluate(X, LABELS, verbose=0)[1], abs=1e-6)
    predictions = np.array([p[model.layers[-1].name] for p in estimator.predict(dataset(X, LABELS, 10))])
    np.testing.assert_allclose(predictions, model.predict(X, verbose=0), atol=1e-5)
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"image": tf.zeros([1, 5, 5, 1])})
    path = estimator.export_saved_model(str(tmp_path / "exported"), receiver).decode()
    [served] = tf.saved_model.load(path).signatures["serving_default"](image=tf.constant(X)).values()
    np.testing.assert_allclose(served, predictions, atol=1e-5)


def test_two_inputs_and_outputs_have_their_names_losses_and_metrics_of_one_kind(tmp_path):
    keras.utils.set_random_seed(3)
    image, more = keras.Input([5, 5, 1], name="image"), keras.Input([3], name="more")
    flat = layers.Concatenate()([layers.Flatten()(image), more])
    outputs = [layers.Dense(3, activation="softmax", name="a")(flat), layers.Dense(1, name="b")(flat)]
    model = keras.Model([more, image], outputs)
    model.compile(
        "sgd",
        {"a": "categorical_crossentropy", "b": "mse"},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["mae"], "b": ["mae"]},
        run_eagerly=True,
    )
    x, labels = {"image": X, "more": 2 * LABELS}, {"a": LABELS, "b": X[:, 0, 0]}
    estimator = make(model, tmp_path, 2)
    for given in (tuple(labels.values()), labels):  # before the training and after it
        expected = model.evaluate(x, labels, batch_size=8, return_dict=True, verbose=0)
        found = estimator.evaluate(dataset(x, given, 8))
        del found["global_step"]
        assert found == pytest.approx(expected, rel=1e-4) and {"a_loss", "b_loss", "a_mae", "b_mae"} <= found.keys()
        estimator.train(dataset(x, given, 4, epochs=2))
        model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert_same_weights(estimator, model)
    assert next(estimator.predict(dataset(x, labels, 8))).keys() == {"a", "b"}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(3, activation="softmax")

    def call(self, inputs):
        return self.dense(self.flatten(inputs))


def test_a_model_that_is_not_built_yet(tmp_path):
    model = compiled(Subclassed(), "sgd")
    estimator = make(model, tmp_path, 2)
    first = np.array([next(iter(p.values())) for p in estimator.predict(dataset(X, LABELS, 8))])
    np.testing.assert_allclose(first, model.predict(X, verbose=0), atol=1e-5)
    estimator.train(dataset(X, LABELS, 4))
    model.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keras_model": network()}, "is not compiled. Call its compile"),
        ({}, "Either .keras_model. or .keras_model_path. needs to be provided"),
        ({"keras_model": compiled(network()), "keras_model_path": "a.keras"}, "but not both"),
        ({"keras_model": compiled(network()), "metric_names_map": {}}, "metric_names_map is for models of Keras 2"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises((errors.ConfigError, ValueError), match=message):
        tf_estimator.model_to_estimator(**arguments)


def test_a_model_of_keras_2_trains_as_under_its_fit(tmp_path):
    def network():
        tf_keras.utils.set_random_seed(3)
        flat = [tf_keras.layers.Flatten(input_shape=[5, 5, 1]), tf_keras.layers.Dense(3, activation="softmax")]
        model = tf_keras.Sequential(flat)
        model.compile(tf_keras.optimizers.legacy.Adam(0.125), "categorical_crossentropy", metrics=["accuracy"])
        return model

    fitted, model = network(), network()
    fitted.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    expected, accuracy = fitted.get_weights(), fitted.evaluate(X, LABELS, verbose=0)[1]
    features = {model.input_names[0]: X}
    names = [variable.name.removesuffix(":0") for variable in model.weights]
    estimator = make(model, tmp_path, 2).train(dataset(features, LABELS, 4))
    # in float64, though its layers' configuration and its checkpoint say float32
    assert "8 examples, float64" in tf_estimator.check(estimator, dataset(features, LABELS, 4))
    assert estimator.evaluate(dataset(features, LABELS, 8))["accuracy"] == pytest.approx(accuracy)
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), value, atol=1e-6, err_msg=name)


def test_weights_of_examples_among_the_features_of_a_saved_model(tmp_path):
    def squared(x):
        return x**2

    weights = np.linspace(0, 2, 24)
    flat = [keras.Input([5, 5, 1]), layers.Flatten(), layers.Dense(3, activation=squared, name="last")]
    model = compiled(keras.Sequential(flat), "sgd")
    model.save(tmp_path / "model.keras")
    weighted = dataset({"features": X, "sample_weights": weights}, LABELS, 12)
    estimator = tf_estimator.model_to_estimator(None, tmp_path / "model.keras", {"squared": squared}, tmp_path / "run")
    before = model.evaluate(X, LABELS, sample_weight=weights, batch_size=12, verbose=0)[0]
    assert estimator.evaluate(weighted)["loss"] == pytest.approx(before)
    estimator.train(weighted)
    model.fit(X, LABELS, sample_weight=weights, batch_size=12, shuffle=False, verbose=0)
    for name, value in zip(("last/kernel", "last/bias"), model.get_weights(), strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), value, atol=1e-5)
