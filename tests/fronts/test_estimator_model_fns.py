"""An Estimator trains the model_fns that people wrote for one device, with their arguments and metrics."""

import random

import numpy as np
import pytest
import tensorflow as tf
from regression import BATCH, X, Y, input_fn, make, model_fn

from tower_train import errors, steps
from tower_train import estimator as tf_estimator
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


def test_a_model_fn_with_regularizers_losses_and_update_ops_in_collections(tmp_path):
    def collected(features, labels, mode):
        w = v1.get_variable(
            "w", [3], tf.float32, v1.ones_initializer(), regularizer=lambda w: 0.1 * tf.reduce_sum(w**2)
        )
        runs_so_far = v1.get_variable("runs", [], tf.int64, v1.zeros_initializer(), trainable=False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, runs_so_far.assign_add(1))
        with tf.name_scope("mine"):
            v1.losses.mean_squared_error(labels, tf.linalg.matvec(tf.cast(features["x"], tf.float32), w))
        loss = tf.add_n([*v1.losses.get_losses("mine/"), v1.losses.get_regularization_loss("w/")])
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = make(tmp_path, 2, collected)
    estimator.train(input_fn, steps=3)
    w = np.ones(3)
    for step in range(3):
        x, y = X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
        w = w - 0.1 * (2 * x.T @ (x @ w - y) / 8 + 0.2 * w)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, atol=1e-6)
    assert estimator.get_variable_value("runs") == 3


def test_what_a_model_fn_must_not_do(tmp_path):
    def own_update(features, labels, mode):
        w = v1.get_variable("w", [3], tf.float64)
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(features["x"], w) - labels))
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=w.assign_sub(w * loss).op)

    def another_each_time(features, labels, mode, params):
        v1.get_variable(f"w{len(v1.trainable_variables())}", [])
        return model_fn(features, labels, mode, params)

    for fn, message in (
        (own_update, "model_fn computes no gradients of variables outside"),
        (another_each_time, r"tower_1 would create the variable 'w\d'"),
    ):
        with pytest.raises((errors.GraphError, ValueError), match=message):
            make(tmp_path, 2, fn).train(input_fn)


def test_initial_values_are_those_of_one_device(tmp_path):
    def drawn(features, labels, mode):
        for i, shape in enumerate(([BATCH], [2 * BATCH, 3])):  # as many rows as examples, and a multiple
            tf.Variable(tf.random.truncated_normal(shape), name=f"drawn{i}")
        with v1.variable_scope("", custom_getter=lambda get, name, shape, dtype, **kw: get(name, shape, dtype, **kw)):
            v1.get_variable("got", [2 * BATCH, 3], initializer=v1.truncated_normal_initializer())
        return model_fn(features["some"], labels, mode, {})

    def batches():
        data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y, tf.sparse.from_dense(X))).batch(BATCH, True)
        return data.map(lambda features, labels, sparse: ({"some": features, "none": None, "sparse": sparse}, labels))

    random.seed(5)  # no state that an Estimator left
    of_python = random.getstate()
    one, two = (make(tmp_path / str(towers), towers, drawn).train(batches, steps=1) for towers in (1, 2))
    for name in ("drawn0", "drawn1", "got"):
        np.testing.assert_array_equal(two.get_variable_value(name), one.get_variable_value(name))
    assert random.getstate() == of_python  # which seeds the initializers of Keras


def test_numbers_for_rows_and_for_elements_of_sequences_are_those_of_one_device(tmp_path):
    def drawing(features, labels, mode):
        rows, times = tf.unstack(tf.shape(features["tokens"]))
        by_element = tf.reshape(tf.random.uniform([rows * times]), [rows, times])
        drawn = tf.reduce_sum(by_element, axis=1) + tf.random.uniform([rows])
        loss = tf.reduce_mean(labels * tf.cast(drawn, labels.dtype)) * v1.get_variable("w", [], labels.dtype)
        train_op = v1.train.GradientDescentOptimizer(1.0).minimize(loss, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def trained(towers):
        estimator = make(tmp_path / str(towers), towers, drawing)
        examples = {"tokens": np.zeros([24, 5], np.int32)}, np.arange(24.0)
        batches = lambda: tf.data.Dataset.from_tensor_slices(examples).batch(12 // towers)  # noqa: E731
        return estimator.train(batches, steps=2).get_variable_value("w")

    assert trained(2) == pytest.approx(trained(1))


def test_names_are_the_librarys_or_subclasses():
    theirs = {name: value for name, value in vars(library.api).items() if not name.startswith("_")}
    assert vars(tf_estimator).keys() >= theirs.keys()
    for name in ("EstimatorSpec", "EvalSpec", "BestExporter", "WarmStartSettings", "BinaryClassHead"):
        assert getattr(tf_estimator, name) is theirs[name]
    for cls in (tf_estimator.DNNClassifier, tf_estimator.experimental.KMeans):
        assert issubclass(cls, tf_estimator.Estimator)
    assert library.estimator.Estimator is tf_estimator.Estimator  # where the library makes its own
    assert library.run_config.RunConfig is tf_estimator.RunConfig


def test_a_loss_divided_by_a_sum_over_the_batch_is_that_of_the_joined_batches(tmp_path):
    """As BERT's loss over masked words; without steps.mean it is refused, with that advice."""

    def masked(divisor):
        def model_fn(features, labels, mode):
            w = v1.get_variable("w", [3], tf.float64, v1.zeros_initializer())
            mask = tf.cast(features["x"][:, 0] > 0, tf.float64)
            losses = tf.square(tf.linalg.matvec(features["x"], w) - labels)
            loss = tf.reduce_sum(mask * losses) / divisor(tf.reduce_sum(mask))
            train_op = v1.train.GradientDescentOptimizer(0.125).minimize(loss, v1.train.get_global_step())
            return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        return model_fn

    with pytest.raises(errors.GraphError, match="divide it by steps.mean"):
        tf_estimator.check(make(tmp_path / "a", 2, masked(tf.identity)), input_fn)
    with pytest.raises(errors.ConfigError, match="in a model_fn call steps.mean"):
        make(tmp_path / "b", 2, masked(lambda total: tf.reduce_sum(steps.join(total[None])))).train(input_fn)
    estimator = make(tmp_path / "c", 2, masked(steps.mean))
    estimator.train(input_fn)
    w = np.zeros(3)
    for step in range(6):
        x, y = X[8 * step :][:8], Y[8 * step :][:8]
        mask = x[:, 0] > 0
        w = w - 0.125 * 2 * x.T @ (mask * (x @ w - y)) / mask.sum()
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, atol=1e-12)


def test_a_training_without_a_step_says_so(tmp_path, capsys):
    estimator = make(tmp_path, 2, model_fn)
    estimator.train(lambda: input_fn(batch=48))  # one batch, and a step takes two
    assert "*** No step was done." in capsys.readouterr().err
    estimator.train(input_fn, max_steps=2)
    estimator.train(input_fn, max_steps=2)
    assert "No step" not in capsys.readouterr().err
