"""An Estimator calls a user's functions by name, and names what it cannot take."""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from regression import EVAL, TRAIN, expected_weights, input_fn, make, model_fn, weights_of

from tower_train import errors
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
    with pytest.raises(errors.ConfigError, match="model_fn takes no argument params. Add it"):
        make(tmp_path, fn=slow, params={"rate": 1})


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


def raises(match, act, kind=errors.ConfigError):
    with pytest.raises(kind, match=match) as caught:
        act()
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


def test_functions_that_cannot_be(tmp_path):
    def unknown(features, labels, mode, weights):
        pass

    def unnamed(x, labels):
        pass

    raises("model_fn takes weights, which it is not given", lambda: make(tmp_path, fn=unknown))
    raises("model_fn takes x, which it is not given", lambda: make(tmp_path, fn=unnamed))
    raises("model_fn takes labels; it must take features", lambda: make(tmp_path, fn=lambda labels: None))
    raises("model_fn must be a function; got None", lambda: make(tmp_path, fn=None))
    estimator = make(tmp_path)
    for act in (estimator.train, estimator.evaluate, lambda given: next(estimator.predict(given))):
        raises("input_fn is a _BatchDataset; it must be a function", lambda act=act: act(input_fn()))
        raises("input_fn is a generator; it must be", lambda act=act: act(x for x in [1]))
    raises("input_fn takes size, which it is not given", lambda: estimator.train(lambda size: input_fn(size)))

    def generator():
        yield {"x": 1}, 2

    raises("input_fn returned a generator", lambda: estimator.train(generator), errors.DataError)


def test_values_that_cannot_be(tmp_path):
    estimator = make(tmp_path)
    raises("steps='3'; it must be a number", lambda: estimator.train(input_fn, steps="3"))
    raises("max_steps='3'; it must be a number", lambda: estimator.train(input_fn, max_steps="3"))
    raises("steps='3'; it must be a number", lambda: estimator.evaluate(input_fn, steps="3"))
    raises("steps=True; it must be a number", lambda: estimator.train(input_fn, steps=True))
    raises("saving_listeners: got 'a'; each must be", lambda: estimator.train(input_fn, saving_listeners=["a"]))
    raises("hooks=3; it must be a list", lambda: estimator.train(input_fn, hooks=3))
    estimator.train(lambda: input_fn(epochs=None), steps=np.int64(2))
    estimator.train(lambda: input_fn(epochs=None), steps=5 / 2)  # as 1.15: until the step is not below
    assert estimator.get_variable_value("global_step") == 5
    assert estimator.evaluate(input_fn, steps=3 / 2)["global_step"] == 5


def test_model_dirs_that_cannot_be(tmp_path):
    file = pathlib.Path(tmp_path, "file")
    file.write_text("")
    raises("file is a file; it must be a directory", lambda: make(file))
    for remote in ("gs://bucket/run", "hdfs://host/run"):
        raises(f"model_dir={remote}: it must be a local or mounted folder", lambda remote=remote: make(remote))
        raises("local or mounted", lambda remote=remote: tf_estimator.RunConfig(model_dir=remote))
    trained = make(tmp_path / "trained").train(input_fn, steps=1)
    raises("export_dir_base=gs://a: it must be a local", lambda: trained.export_saved_model("gs://a", lambda: None))
    raises("export_dir_base=.*file is a file", lambda: trained.export_saved_model(file, lambda: None))
    raises("model.ckpt-1 has no variable 'biased'", lambda: trained.get_variable_value("biased"), errors.RunError)
