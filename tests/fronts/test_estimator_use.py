"""Estimators evaluate, predict, warm-start and export by checkpoints as TensorFlow 1.15 documented."""

import os

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import X, Y, expected_weights, input_fn, make, model_fn

from tower_train import estimator as tf_estimator
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


def test_all_that_computes_before_training_begins_with_a_warm_start(tmp_path):
    trained = make(tmp_path / "trained", 2).train(input_fn)
    config, params = tf_estimator.RunConfig(num_gpus=2), {"rate": 1e-30}
    estimator = tf_estimator.Estimator(model_fn, tmp_path / "new", config, params, trained.model_dir)
    values = expected_weights(6, 2)
    y = X @ values[:3] + values[3]
    np.testing.assert_allclose([p["y"] for p in estimator.predict(input_fn)], y, atol=1e-9)
    assert estimator.evaluate(input_fn)["mae"] == pytest.approx(np.abs(y - Y).mean(), abs=1e-6)
    estimator.train(input_fn, steps=1)
    np.testing.assert_allclose(estimator.get_variable_value("weights"), values[:3], atol=1e-9)


def test_train_and_evaluate_evaluates_and_exports_what_it_trains(tmp_path):
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    exporters = [tf_estimator.LatestExporter("latest", receiver), tf_estimator.BestExporter("best", receiver)]
    train = tf_estimator.TrainSpec(lambda: input_fn(epochs=None), max_steps=8)
    evaluate = tf_estimator.EvalSpec(input_fn, steps=None, exporters=exporters, throttle_secs=0)
    result, exported = tf_estimator.train_and_evaluate(make(tmp_path, 2, save_checkpoints_steps=4), train, evaluate)
    values = expected_weights(8, 2)
    error = pytest.approx(np.abs(X @ values[:3] + values[3] - Y).mean(), abs=1e-6)
    assert result["global_step"] == 8 and result["mae"] == error
    shown = jobs.events(tmp_path / "eval").Scalars("mae")
    assert [event.step for event in shown] == [4, 8] and shown[-1].value == error
    assert exported[0].decode() == str(max((tmp_path / "export" / "latest").iterdir()))
    serve = tf.saved_model.load(exported[0].decode()).signatures["serving_default"]  # in eager TensorFlow
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"], X @ values[:3] + values[3], atol=1e-9)
    assert tf_estimator.train_and_evaluate(make(tmp_path, 2), train, evaluate) == (None, None)


def test_listeners_and_hooks_hear_what_they_do_on_one_device_of_the_library(tmp_path):
    """In the library's order, over a restart too; a hook evaluates meanwhile."""

    def heard(estimator, towers):
        calls = []

        class Hook(v1.train.SessionRunHook):
            def begin(self):
                calls.append("begin")

            def after_run(self, run_context, run_values):
                calls.append("run")

            def end(self, session):
                calls.append("end")

        class Listener(v1.train.CheckpointSaverListener):
            def after_save(self, session, global_step_value):
                calls.append(global_step_value)

        for end in (3, 5):
            evaluator = tf_estimator.experimental.InMemoryEvaluatorHook(estimator, input_fn, every_n_iter=2)
            data = lambda: input_fn(4 // towers, None)  # noqa: E731
            estimator.train(data, [Hook(), evaluator], max_steps=end, saving_listeners=[Listener()])
        shown = jobs.events(os.path.join(estimator.model_dir, "eval")).Scalars("average_loss")
        return calls, [event.step for event in shown], np.array([event.value for event in shown])

    model = dict(feature_columns=[tf.feature_column.numeric_column("x", [3])], optimizer="SGD")
    config = lambda towers: tf_estimator.RunConfig(num_gpus=towers, save_checkpoints_steps=2)  # noqa: E731
    one, two = (
        heard(module.LinearRegressor(model_dir=tmp_path / f"{towers}", config=config(towers), **model), towers)
        for module, towers in ((library.api, 1), (tf_estimator, 2))
    )
    assert two[:2] == one[:2] and 5 in two[0]
    np.testing.assert_allclose(two[2], one[2], rtol=1e-5)
