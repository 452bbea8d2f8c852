"""model_to_estimator trains what Keras' own fit trains, and leaves the Keras model as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
    return model


def make(model, model_dir, towers):
    return tf_estimator.model_to_estimator(model, model_dir, tf_estimator.RunConfig(num_gpus=towers))


def assert_same_weights(estimator, model, atol=1e-5):
    for variable in model.weights:
        np.testing.assert_allclose(
            estimator.get_variable_value(variable.path), variable.numpy(), atol=atol, err_msg=variable.path
        )


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_equals_keras_fit_on_the_joined_batches(tmp_path, towers, optimizer):
    model = compiled(network(), optimizer)
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


def test_towers_draw_different_dropout_masks_and_a_step_moves_seeds_once(tmp_path):
    inputs = keras.Input([200])
    model = keras.Model(inputs, layers.Dropout(0.5, seed=1)(inputs) * layers.Dense(1, use_bias=False)(inputs))
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.0))
    masks = []

    class Masks(tf_estimator.SessionRunHook):
        def begin(self):
            graph = tf.compat.v1.get_default_graph()
            names = [op.name for op in graph.get_operations() if "dropout" in op.name and op.type == "SelectV2"]
            self._masks = [graph.get_tensor_by_name(f"{name}:0") for name in sorted(names)]

        def before_run(self, run_context):
            return tf_estimator.SessionRunArgs(self._masks)

        def after_run(self, run_context, run_values):
            masks.append([mask > 0 for mask in run_values.results])

    estimator = make(model, tmp_path, 2)
    ones = np.ones([1, 200], np.float32)
    estimator.train(lambda: tf.data.Dataset.from_tensors((ones, ones)).repeat(), steps=2, hooks=[Masks()])
    assert [len(step) for step in masks] == [2, 2]
    for one, other in [masks[0], masks[1], (masks[0][0], masks[1][0])]:
        assert 0.3 < np.mean(one == other) < 0.7
    [seed] = [name for name in estimator.get_variable_names() if name.endswith("seed_generator_state")]
    assert estimator.get_variable_value(seed)[1] == 2


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
    with pytest.raises(errors.GraphError, match="the model's inputs right are missing"):
        next(estimator.predict(lambda: tf.data.Dataset.from_tensors({"left": values["left"]})))


def test_misuse():
    with pytest.raises(errors.ConfigError, match="not compiled. Call its compile"):
        tf_estimator.model_to_estimator(network())
    with pytest.raises(errors.ConfigError, match="no variables yet"):
        tf_estimator.model_to_estimator(compiled(keras.Sequential([layers.Dense(3)])))
