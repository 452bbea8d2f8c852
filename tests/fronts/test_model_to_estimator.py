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


def input_fn(batch, epochs=1):
    return tf.data.Dataset.from_tensor_slices((X, LABELS)).repeat(epochs).batch(batch)


def network(dropout=0.0, normalized=False):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input([5, 5, 1]),
            layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2"),
            *([layers.BatchNormalization(momentum=0.5)] if normalized else []),
            layers.Flatten(),
            layers.Dropout(dropout, seed=1),
            layers.Dense(3, activation="softmax"),
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


@pytest.mark.parametrize(("towers", "optimizer"), [(1, "sgd"), (2, "adam")])
def test_training_equals_keras_fit_on_the_joined_batches(tmp_path, towers, optimizer):
    model = compiled(network(dropout=0.3), optimizer)  # drawn for the joined batch
    before = model.get_weights()
    estimator = make(model, tmp_path, towers)
    estimator.train(lambda: input_fn(4, epochs=2), steps=4)  # it ends and goes on, with the optimizer's state
    estimator.train(lambda: input_fn(4, epochs=None).skip(4 * towers), steps=4)
    for value, unchanged in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, unchanged)
    batches = tf.data.Dataset.from_tensor_slices((X, LABELS)).repeat().batch(4 * towers).take(8)
    model.fit(batches, shuffle=False, verbose=0)  # also to see that it still can be trained
    assert_same_weights(estimator, model)
    iterations = [name for name in estimator.get_variable_names() if name.endswith("/iteration")]
    assert estimator.get_variable_value(iterations[0]) == 8


@pytest.mark.parametrize("towers", [1, 2])
def test_masked_sequences_with_sparse_gradients_equal_keras_fit(tmp_path, towers):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([4]), layers.Embedding(5, 3, mask_zero=True), layers.SimpleRNN(3)])
    model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01), run_eagerly=True)
    ids = rng.integers(0, 5, [24, 4])  # several of each in a batch
    estimator = make(model, tmp_path, towers)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((ids, LABELS)).batch(8 // towers))
    model.fit(ids, LABELS, batch_size=8, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)


def test_moving_averages_of_one_tower_and_metrics_are_keras_own(tmp_path):
    model = compiled(network(normalized=True), "sgd")
    estimator = make(model, tmp_path, 1)
    estimator.train(lambda: input_fn(4))
    model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)
    found = estimator.evaluate(lambda: input_fn(10))
    assert found.keys() == {"accuracy", "loss", "global_step"}
    assert found["accuracy"] == pytest.approx(model.evaluate(X, LABELS, verbose=0)[1], abs=1e-6)
    assert found["global_step"] == 6
    predictions = np.array([p[model.layers[-1].name] for p in estimator.predict(lambda: input_fn(10))])
    np.testing.assert_allclose(predictions, model.predict(X, verbose=0), atol=1e-5)


def test_later_optimizers_of_a_program_go_on_from_checkpoints_of_its_first_one(tmp_path):
    for _ in range(2):  # Keras numbers the optimizers of a program
        model = keras.Sequential([keras.Input([5, 5, 1]), layers.Flatten(), layers.Dense(3, name="only")], name="named")
        estimator = make(compiled(model, keras.optimizers.Adam()), tmp_path, 1)
        estimator.train(lambda: input_fn(4), steps=2)
    assert estimator.get_variable_value("adam/iteration") == estimator.get_variable_value("global_step") == 4


def test_inputs_and_outputs_have_the_names_of_the_models(tmp_path):
    left, right = keras.Input([2], name="left"), keras.Input([2], name="right")
    y = layers.Dense(1, name="y", kernel_initializer="ones")(left - 2 * right)
    model = keras.Model([right, left], [y, layers.Identity(name="z")(left)])
    model.compile(loss=["mse", None], optimizer="sgd", metrics=[["mae"], None])
    values = {"left": np.ones([4, 2], np.float32), "right": np.full([4, 2], 3, np.float32)}
    estimator = make(model, tmp_path, 2)
    estimator.train(lambda: tf.data.Dataset.from_tensors((values, [[-10.0]] * 4)).repeat(), steps=1)
    first = next(
        estimator.predict(lambda: tf.data.Dataset.from_tensors(values), checkpoint_path=f"{tmp_path}/model.ckpt-0")
    )
    assert first["y"] == pytest.approx(-10) and list(first["z"]) == [1, 1]
    with pytest.raises(ValueError, match='Missing data for input "right"'):
        next(estimator.predict(lambda: tf.data.Dataset.from_tensors({"left": values["left"]})))


def two_outputs(seed=3):
    keras.utils.set_random_seed(seed)
    image = keras.Input([5, 5, 1], name="image")
    flat = layers.Flatten()(image)
    model = keras.Model(image, [layers.Dense(3, activation="softmax", name="a")(flat), layers.Dense(1, name="b")(flat)])
    model.compile(
        "sgd", {"a": "categorical_crossentropy", "b": "mse"}, loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["mae"], "b": ["mae"]},
    )  # fmt: skip
    return model


TARGETS = {"a": LABELS, "b": X[:, 0, 0]}


def named_input_fn(batch=8, epochs=1):
    return tf.data.Dataset.from_tensor_slices(({"image": X}, TARGETS)).repeat(epochs).batch(batch)


def test_two_outputs_have_their_own_losses_and_metrics_of_one_kind(tmp_path):
    model = two_outputs()
    expected = model.evaluate(X, TARGETS, batch_size=8, return_dict=True, verbose=0)
    found = make(model, tmp_path, 2).evaluate(lambda: named_input_fn().map(lambda x, y: (x["image"], (y["a"], y["b"]))))
    assert found.pop("global_step") == 0 and found.keys() == expected.keys()
    assert {"a_loss", "b_loss", "a_mae", "b_mae"} <= found.keys()
    assert found == pytest.approx(expected, rel=1e-5)


def test_two_outputs_train_as_under_keras_fit(tmp_path):
    model = two_outputs()
    estimator = make(model, tmp_path, 2).train(lambda: named_input_fn(4, epochs=2))
    model.fit(X, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)
    expected = model.evaluate(X, TARGETS, batch_size=8, return_dict=True, verbose=0)
    found = estimator.evaluate(named_input_fn)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_labels_of_other_names_are_refused(tmp_path):
    def other():
        return named_input_fn().map(lambda x, y: (x, {"a": y["a"], "c": y["b"]}))

    with pytest.raises(errors.GraphError, match="gives the labels c; the model's outputs are a, b"):
        make(two_outputs(), tmp_path, 1).train(other)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(3, activation="softmax")

    def call(self, inputs):
        return self.dense(self.flatten(inputs))


@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_a_model_that_is_not_built_yet(tmp_path, kind):
    if kind == "sequential":
        model = keras.Sequential([layers.Flatten(), layers.Dense(3, activation="softmax")])
    else:
        model = Subclassed()
    estimator = make(compiled(model, "sgd"), tmp_path, 2)
    first = np.array([next(iter(p.values())) for p in estimator.predict(lambda: input_fn(8))])
    np.testing.assert_allclose(first, model.predict(X, verbose=0), atol=1e-5)
    estimator.train(lambda: input_fn(4))
    model.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)
    assert estimator.evaluate(lambda: input_fn(8))["accuracy"] == pytest.approx(model.evaluate(X, LABELS, verbose=0)[1])


def test_a_model_is_exported_before_it_is_trained(tmp_path):
    model = compiled(network())
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 5, 5, 1])})
    path = make(model, tmp_path, 1).export_saved_model(tmp_path / "export", receiver)
    serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
    [found] = serve(x=tf.constant(X)).values()
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=1e-5)


def test_a_model_of_a_file(tmp_path):
    def squared(x):
        return x**2

    model = keras.Sequential([keras.Input([5, 5, 1]), layers.Flatten(), layers.Dense(3, activation=squared)])
    model.compile(loss="mse", optimizer="sgd")
    file = tmp_path / "model.keras"
    model.save(file)
    estimator = tf_estimator.model_to_estimator(
        keras_model_path=file, custom_objects={"squared": squared}, model_dir=tmp_path / "run"
    )
    found = np.array([next(iter(p.values())) for p in estimator.predict(lambda: input_fn(8))])
    np.testing.assert_allclose(found, model.predict(X, verbose=0), atol=1e-5)
    for path in (file, tmp_path / "nowhere.keras"):
        with pytest.raises(errors.ConfigError, match="Keras cannot load it .*Give a file that") as caught:
            tf_estimator.model_to_estimator(keras_model_path=path)
        assert "\n" not in str(caught.value)


def test_misuse():
    for model in (network(), "model"):
        with pytest.raises(errors.ConfigError, match="must be a compiled Keras model. Call its compile"):
            tf_estimator.model_to_estimator(model)
    for kwargs in ({}, {"keras_model": network(), "keras_model_path": "file"}):
        with pytest.raises(errors.ConfigError, match="either keras_model or keras_model_path"):
            tf_estimator.model_to_estimator(**kwargs)
    with pytest.raises(errors.ConfigError, match="metric_names_map is for models of Keras 2 only"):
        tf_estimator.model_to_estimator(compiled(network()), metric_names_map={})


@pytest.mark.parametrize("towers", [1, 2])
def test_a_model_of_keras_2_trains_as_under_its_fit(tmp_path, towers):
    def network():
        tf_keras.utils.set_random_seed(3)
        flat = [tf_keras.layers.Flatten(input_shape=[5, 5, 1]), tf_keras.layers.Dense(3, activation="softmax")]
        model = tf_keras.Sequential(flat)
        model.compile(tf_keras.optimizers.legacy.Adam(0.125), "categorical_crossentropy", metrics=["accuracy"])
        return model

    fitted = network()
    fitted.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0)
    expected, accuracy = fitted.get_weights(), fitted.evaluate(X, LABELS, verbose=0)[1]
    model = network()
    names, fed = [variable.name.removesuffix(":0") for variable in model.weights], model.input_names[0]

    def named(batch):
        return tf.data.Dataset.from_tensor_slices(({fed: X}, LABELS)).batch(batch)

    estimator = make(model, tmp_path, towers).train(lambda: named(8 // towers))
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), value, atol=1e-6, err_msg=name)
    assert estimator.evaluate(lambda: named(8))["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("towers", [1, 2])
def test_weights_of_examples_among_the_features(tmp_path, towers):
    weights = np.linspace(0, 2, 24)
    model = compiled(network(), "sgd")

    def weighted():
        features = {"features": X, "sample_weights": weights}
        return tf.data.Dataset.from_tensor_slices((features, LABELS)).batch(24 // towers)

    estimator = make(model, tmp_path, towers)
    before = model.evaluate(X, LABELS, sample_weight=weights, batch_size=24, verbose=0)[0]
    estimator.train(weighted)
    assert estimator.evaluate(weighted, checkpoint_path=f"{tmp_path}/model.ckpt-0")["loss"] == pytest.approx(before)
    model.fit(X, LABELS, sample_weight=weights, batch_size=24, shuffle=False, verbose=0)
    assert_same_weights(estimator, model)
