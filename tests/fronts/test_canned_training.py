"""Canned estimators and model_to_estimator on several towers train what one device trains on the joined batches."""

import shutil

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1
COUNT, BATCH = 48, 4
rng = np.random.default_rng(0)
NUMBER = rng.normal(size=COUNT).astype(np.float32)
KIND = rng.integers(0, 3, COUNT)
X = {"number": NUMBER, "kind": np.array(["p", "q", "r"])[KIND], "weight": rng.integers(1, 4, COUNT).astype(np.float32)}
CLASS = (NUMBER + KIND > 1).astype(np.int64)
CLASS3 = np.digitize(NUMBER, [-0.5, 0.5])
number = tf.feature_column.numeric_column("number")
kind = tf.feature_column.categorical_column_with_vocabulary_list("kind", ["p", "q", "r"])
TOWERS, STEPS, RATE = 2, 4, 2**-6
SGD = v1.train.GradientDescentOptimizer(RATE)
MEAN = v1.losses.Reduction.SUM_OVER_BATCH_SIZE
EMBEDDING = tf.feature_column.embedding_column(kind, 2)
CROSSED = tf.feature_column.crossed_column(["kind", tf.feature_column.bucketized_column(number, [0.0])], 5)


def input_fn(labels, epochs=None, batch=BATCH):
    return lambda: tf.data.Dataset.from_tensor_slices((X, labels)).repeat(epochs).batch(batch, drop_remainder=True)


def config(towers=1, **settings):
    return tf_estimator.RunConfig(num_gpus=towers, tf_random_seed=1, **settings)


@pytest.mark.parametrize(
    ("name", "labels", "arguments"),
    [
        (
            "LinearClassifier",
            CLASS,
            dict(feature_columns=[number, kind], weight_column="weight", optimizer=lambda: SGD),
        ),
        (
            "DNNLinearCombinedClassifier",
            CLASS3,
            dict(
                linear_feature_columns=[CROSSED, kind],
                linear_optimizer="Ftrl",
                dnn_feature_columns=[EMBEDDING, number],
                dnn_optimizer=v1.train.MomentumOptimizer(RATE, 0.5),
                dnn_hidden_units=[4, 3],
                n_classes=3,
                loss_reduction=MEAN,
            ),
        ),
    ],
)
def test_all_variables_and_summaries_are_the_librarys(tmp_path, name, labels, arguments):
    """Weights of examples, sums and means as losses, sparse gradients, two optimizers; under the library's names."""
    one = vars(library.api)[name](model_dir=tmp_path / "one", config=config(save_summary_steps=1), **arguments)
    one.train(input_fn(labels, batch=4 * TOWERS), steps=STEPS)
    (tmp_path / "towers").mkdir()
    for path in (tmp_path / "one").glob("model.ckpt-0.*"):  # the initial values
        shutil.copy(path, tmp_path / "towers")
    v1.train.update_checkpoint_state(str(tmp_path / "towers"), "model.ckpt-0")
    settings = config(TOWERS, save_summary_steps=1)
    towers = getattr(tf_estimator, name)(model_dir=tmp_path / "towers", config=settings, **arguments)
    towers.train(input_fn(labels), steps=STEPS)
    assert towers.get_variable_names() == one.get_variable_names()
    for variable in one.get_variable_names():
        expected = one.get_variable_value(variable)
        found = towers.get_variable_value(variable)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=variable)
    shown, expected = (jobs.events(tmp_path / folder) for folder in ("towers", "one"))
    assert shown.Tags()["scalars"] == expected.Tags()["scalars"]
    assert shown.Tags()["histograms"] == expected.Tags()["histograms"]
    losses, expected = ([event.value for event in each.Scalars("loss")] for each in (shown, expected))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


IMAGES = rng.normal(size=[24, 5, 5, 1]).astype(np.float32)
LABELS = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 24)]


def dataset(x, y, batch):
    return lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def test_a_model_of_keras_2_trains_as_under_its_fit(tmp_path):
    def network():
        tf_keras.utils.set_random_seed(3)
        flat = [tf_keras.layers.Flatten(input_shape=[5, 5, 1]), tf_keras.layers.Dense(3, activation="softmax")]
        model = tf_keras.Sequential(flat)
        model.compile(tf_keras.optimizers.legacy.Adam(0.125), "categorical_crossentropy", metrics=["accuracy"])
        return model

    fitted, model = network(), network()
    fitted.fit(IMAGES, LABELS, batch_size=8, shuffle=False, verbose=0)
    expected, accuracy = fitted.get_weights(), fitted.evaluate(IMAGES, LABELS, verbose=0)[1]
    features = {model.input_names[0]: IMAGES}
    names = [variable.name.removesuffix(":0") for variable in model.weights]
    config = tf_estimator.RunConfig(num_gpus=2)
    estimator = tf_estimator.model_to_estimator(model, model_dir=tmp_path, config=config)
    estimator.train(dataset(features, LABELS, 4))
    # in float64, though its layers' configuration and its checkpoint say float32
    assert "8 examples, float64" in tf_estimator.check(estimator, dataset(features, LABELS, 4))
    assert estimator.evaluate(dataset(features, LABELS, 8))["accuracy"] == pytest.approx(accuracy)
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Either .keras_model. or .keras_model_path. needs to be provided"),
        ({"keras_model": tf_keras.Sequential()}, "has not been compiled yet"),
        ({"keras_model": keras.Sequential()}, "is one of Keras 3, .* TF_USE_LEGACY_KERAS=1 .*multi_gpu_model"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises((errors.ConfigError, ValueError), match=message):
        tf_estimator.model_to_estimator(**arguments)
