"""Batch normalisation of Keras models and Estimators on towers, against plain Keras and one device, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tower_train
from tower_train import estimator as tf_estimator

v1, L = tf.compat.v1, keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(1, 2, [46, 4, 4, 3]), RNG.integers(0, 4, 46)


def fitted(gpus, **options):
    """Weights after three steps, of which the last has fewer examples; gpus: 0 for plain Keras."""
    keras.utils.set_random_seed(1)
    norms = L.BatchNormalization(momentum=0.5), L.BatchNormalization(axis=1, synchronized=True, scale=False)
    norms = norms if gpus else (norms[0], L.BatchNormalization(axis=1, scale=False))  # that needs a strategy
    hidden = [L.Conv2D(4, 2), norms[0], L.ReLU(), norms[1], L.Dropout(0.2), L.Flatten(), L.Dense(4)]
    model = keras.Sequential([keras.Input([4, 4, 3]), *hidden])
    trained = tower_train.multi_gpu_model(model, gpus=gpus, **options) if gpus else model
    keras.utils.set_random_seed(2)
    trained.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.run_eagerly = not gpus  # in which three steps take less time than to trace one
    trained.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model.get_weights()


def test_keras_models_train_what_plain_keras_trains(float64):
    expected = fitted(0)
    for gpus in (1, 3):
        for found, value in zip(fitted(gpus), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12)


def test_another_way_to_normalise_is_refused(float64):
    with pytest.raises(tower_train.errors.ConfigError, match="must be 'global' or 'tower'"):
        fitted(3, batch_norm="none")


def by_moments(x, training):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def by_fused_operation(x, training):
    """As Keras 2 calls it, in float32; its moving variance is divided by n - 1."""
    layer = tf_keras.layers.BatchNormalization(momentum=0.5)
    outputs = layer(tf.cast(x, tf.float32), training)
    for update in layer.updates:
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return tf.cast(outputs, tf.float64)


@pytest.mark.parametrize(("normalized", "tolerance"), [(by_moments, 1e-9), (by_fused_operation, 1e-5)])
def test_estimators_train_what_one_device_trains(tmp_path, normalized, tolerance):
    def model_fn(features, labels, mode):
        dropped = tf.nn.dropout(features, 0.1, seed=3)
        x = normalized(tf.nn.conv2d(dropped, v1.get_variable("k", [2, 2, 3, 5], tf.float64), 1, "VALID"), True)
        logits = tf.reduce_mean(tf.nn.relu(x), [1, 2]) @ v1.get_variable("w", [5, 4], tf.float64)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        update = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(
            mode, loss=loss, train_op=tf.group(update, v1.get_collection(v1.GraphKeys.UPDATE_OPS))
        )

    def train(towers, **options):
        config = tf_estimator.RunConfig(num_gpus=towers, tf_random_seed=1, **options)
        made = tf_estimator.Estimator(model_fn, str(tmp_path / f"{towers} {options}"), config)
        ends = [4, 8, 12, 15, 16, 21, 22, 24, 28][3 // towers - 1 :: 3 // towers]  # of the batches, which are uneven

        def batches():
            return ((X[begin:end], Y[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))

        specs = tf.TensorSpec([None, *X.shape[1:]], tf.float64), tf.TensorSpec([None], tf.int64)
        made.train(lambda: tf.data.Dataset.from_generator(batches, output_signature=specs))
        return {name: made.get_variable_value(name) for name in made.get_variable_names()}

    one, several = train(1), train(3)
    for name, value in one.items():
        np.testing.assert_allclose(several[name], value, rtol=tolerance, atol=tolerance / 10, err_msg=name)
    if normalized is by_moments:
        assert np.abs(train(3, batch_norm="tower")["k"] - one["k"]).max() > 1e-4
