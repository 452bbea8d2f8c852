"""model_to_estimator trains what the fit of Keras 2 trains."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train import estimator as tf_estimator

rng = np.random.default_rng(0)
X = rng.normal(size=[24, 5, 5, 1]).astype(np.float32)
LABELS = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 24)]


def dataset(x, y, batch):
    """An input_fn."""
    return lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


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
