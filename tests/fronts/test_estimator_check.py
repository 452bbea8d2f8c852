"""tower_train.estimator.check shows on a few examples whether towers train what one device trains."""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from regression import Runs, X, Y, expected_weights, input_fn, make, model_fn, weights_of

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.proof import comparison

v1 = tf.compat.v1


def normal(x):
    noise = tf.random.normal([tf.shape(x)[0], x.shape[1]], dtype=x.dtype)
    assert noise.shape[1] == x.shape[1]
    return tf.nn.batch_normalization(x + noise, *tf.nn.moments(x, [0]), None, None, 1e-3)


def with_layers(features, labels, mode):
    """Of Keras layers made anew in each call; v1.losses divides in float32."""
    x = tf_keras.layers.BatchNormalization()(features["x"], training=True)
    x = normal(tf.nn.dropout(tf.keras.layers.Dropout(0.5)(x, training=True), 0.5))
    loss = v1.losses.mean_squared_error(labels, tf.keras.layers.Dense(1)(x)[:, 0])
    train_op = v1.train.AdamOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    loss = tf.identity(loss, name="loss")  # as the library's summary
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_what_passes_leaves_no_trace(tmp_path):
    estimator = make(tmp_path, 3, with_layers, tf_random_seed=None)
    assert estimator.train(input_fn, steps=1).get_variable_value("global_step") == 1
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    line = tf_estimator.check(estimator, lambda: input_fn().unbatch().shuffle(48).batch(5))
    found = re.fullmatch(r"towers:   3 equal 1 on this network to (\S+) \(2 steps of .* float32; \S+ s\)", line)
    assert float(found[1]) < 1e-6, line
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_updates_by_hooks_are_compared(tmp_path):
    def fn(features, labels, mode):
        loss = v1.losses.mean_squared_error(labels, tf.keras.layers.Dense(1)(features["x"])[:, 0])
        update = v1.train.AdamOptimizer(0.01).minimize(loss)
        train_op = v1.train.get_global_step().assign_add(1)
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[Runs(update)])

    assert "2 equal 1 on this network" in tf_estimator.check(make(tmp_path, 2, fn), input_fn)


def summed(features, labels, mode, params):
    spec = model_fn(features, labels, mode, params)
    loss = spec.loss * tf.cast(tf.size(labels), tf.float64)
    optimizer = v1.train.AdamOptimizer(0.01)  # whose weights hardly know a factor of the gradient
    return spec._replace(loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))


def test_a_first_training_compares_few_examples_if_it_takes_long_and_then_trains_as_if_it_had_not(
    tmp_path, compared, capsys, monkeypatch
):
    monkeypatch.setattr(comparison, "_LONG_SECS", 0)
    estimator = make(tmp_path, 2)
    for _ in range(2):
        estimator.train(input_fn, steps=1)
    said = capsys.readouterr().out
    assert said.count("comparing 2 with 1, for about") == said.count("2 equal 1 on this network to ") == 1
    assert "(2 steps of 4 examples" in said
    np.testing.assert_allclose(weights_of(estimator), expected_weights(2, 2, first_row=lambda step: 0), rtol=1e-12)


def test_a_first_training_of_what_is_not_a_mean_over_examples_is_refused(tmp_path, compared):
    with pytest.raises(
        errors.GraphError, match=r"^2 towers differ from 1 on this network: \S+ by .*\n.*\n.*\(check_towers='never'"
    ):
        make(tmp_path, 2, summed).train(input_fn, steps=1)
    assert not any(tmp_path.iterdir())


def test_none_is_compared_first_if_the_configuration_says_so(tmp_path, compared):
    assert make(tmp_path, 2, summed, check_towers="never").train(input_fn, steps=1)


def test_batches_of_no_fixed_size_are_compared_as_such(tmp_path):
    def fn(features, labels, mode):
        weights = v1.get_variable("weights", [3], tf.float64, v1.zeros_initializer())
        errors_squared = tf.square(tf.linalg.matvec(features["x"], weights) - labels)
        loss = tf.reduce_sum(errors_squared) / (labels.shape[0] or 4)  # a mean only if the size is known
        step = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=step)

    tf_estimator.check(make(tmp_path, 2, fn), lambda: input_fn().unbatch().batch(4, drop_remainder=True))
    with pytest.raises(errors.GraphError, match="weights by"):
        tf_estimator.check(make(tmp_path, 2, fn), input_fn)


@pytest.mark.parametrize(
    ("towers", "given", "error"),
    [
        (1, input_fn, r"with one device. Give RunConfig\(num_gpus=2\) or more"),
        (2, lambda: input_fn(count=3), "fewer than 4 examples"),
        (2, lambda: ({"x": X}, Y), "Return a tf.data.Dataset"),
    ],
)
def test_mistakes(tmp_path, towers, given, error):
    with pytest.raises(errors.UserError, match=error) as caught:
        tf_estimator.check(make(tmp_path, towers), given)
    assert "\n" not in str(caught.value) and not any(tmp_path.iterdir())
