"""An Estimator calls a user's functions by name, and names what it cannot take."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from regression import EVAL, TRAIN, expected_weights, input_fn, make, model_fn, weights_of

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


def test_what_functools_partial_binds_stays(tmp_path):
    slow = functools.partial(model_fn, params={"rate": 2**-8})
    estimator = make(tmp_path, fn=slow).train(functools.partial(input_fn, batch=4, epochs=2))
    np.testing.assert_allclose(weights_of(estimator), expected_weights(24, rate=2**-8), atol=1e-12)
    seen = []

    def with_params(params, mode):
        seen.append((params, mode))
        return input_fn()

    bound = functools.partial(with_params, params={"a": 1})
    make(tmp_path / "other", params={"rate": 1e-3}).train(bound, steps=1)
    assert seen == [({"a": 1}, TRAIN)]


def test_arguments_are_passed_by_name_in_any_order(tmp_path):
    def turned(mode, params, labels, features):
        return model_fn(features, labels, mode, params)

    class Callable:
        def __call__(self, config, mode, features, labels, params):
            assert config.num_gpus == 2
            return turned(mode, params, labels, features)

    for i, fn in enumerate([turned, Callable(), lambda labels, mode, params, features: turned(mode, params, labels,
                                                                                              features)]):  # fmt: skip
        estimator = make(tmp_path / str(i), 2, fn).train(input_fn)
        np.testing.assert_allclose(weights_of(estimator), expected_weights(6, 2), atol=1e-12)
        assert estimator.evaluate(input_fn).keys() == {"mae", "loss", "global_step"}
        next(estimator.predict(input_fn))


def test_a_model_fn_without_mode_and_labels(tmp_path):
    def smallest(features):
        w = v1.get_variable("w", [3], tf.float64, v1.ones_initializer())
        loss = tf.reduce_sum(tf.square(w)) + 0 * tf.reduce_sum(features["x"])
        train_op = v1.train.GradientDescentOptimizer(0.25).minimize(loss, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(None, {"y": features["x"] @ w[:, tf.newaxis]}, loss, train_op)

    def unlabelled():
        return input_fn().map(lambda features, labels: features)

    estimator = make(tmp_path, 2, smallest).train(unlabelled, steps=1)
    np.testing.assert_allclose(estimator.get_variable_value("w"), [0.5] * 3)
    assert estimator.evaluate(unlabelled)["loss"] == pytest.approx(0.75)
    assert next(estimator.predict(unlabelled))["y"].shape == (1,)


def test_the_property_model_fn_has_the_params_bound(tmp_path):
    estimator = make(tmp_path, params={"rate": 0.25})
    with tf.Graph().as_default():
        v1.train.create_global_step()
        features, labels = v1.data.make_one_shot_iterator(input_fn()).get_next()
        spec = estimator.model_fn(features, labels, mode=EVAL, config=estimator.config)
    assert spec.mode == EVAL and spec.eval_metric_ops.keys() == {"mae"}


def test_an_input_context_gives_the_number_of_towers(tmp_path):
    def per_replica(input_context):
        return input_fn(batch=input_context.get_per_replica_batch_size(12))

    estimator = make(tmp_path, 3).train(per_replica)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(4, 3), atol=1e-12)


def test_values_that_the_library_takes(tmp_path):
    estimator = make(tmp_path)
    estimator.train(lambda: input_fn(epochs=None), steps=np.int64(2))
    estimator.train(lambda: input_fn(epochs=None), steps=5 / 2)  # until the step is not below
    assert estimator.get_variable_value("global_step") == 5
    assert estimator.evaluate(input_fn, steps=3 / 2)["global_step"] == 5
