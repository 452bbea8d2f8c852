"""Estimators train, evaluate, predict, warm-start and export by checkpoints as TensorFlow 1.15 documented, on one tower
and on several; TPUEstimators too."""

import os
import types

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import BATCH, TRAIN, X, Y, expected_weights, input_fn, make, model_fn, weights_of

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


_JIT_LEVEL = v1.ConfigProto()
_JIT_LEVEL.graph_options.optimizer_options.global_jit_level = v1.OptimizerOptions.ON_1


@pytest.mark.parametrize(("towers", "options"), [(5, {"session_config": _JIT_LEVEL}), (2, {"jit_compile": "always"})])
def test_towers_train_the_weights_of_one_device_on_their_joined_batches(tmp_path, towers, options):
    estimator = make(tmp_path, towers, **options)
    assert estimator.train(lambda: input_fn(epochs=3)) is estimator
    steps = 36 // towers  # the last batch does not suffice for five towers
    np.testing.assert_allclose(weights_of(estimator), expected_weights(steps, towers), atol=1e-12)
    assert estimator.get_variable_value("global_step") == steps
    names = sorted(estimator.get_variable_names())
    assert names == ["bias", "bias/Momentum", "global_step", "weights", "weights/Momentum"]


def test_hooks_find_the_first_towers_tensors_by_the_models_own_names_and_end_the_training(tmp_path):
    losses = []

    class Fetches(v1.train.SessionRunHook):
        def before_run(self, run_context):
            return v1.train.SessionRunArgs("squared_error:0")

        def after_run(self, run_context, run_values):
            losses.append(run_values.results)

    hooks = [Fetches(), jobs.stop_at(2)]
    estimator = make(tmp_path, 2, save_summary_steps=1).train(lambda: input_fn(epochs=None), hooks=hooks)
    assert losses[0] == pytest.approx(np.mean(Y[:BATCH] ** 2))  # at weights 0
    assert estimator.get_variable_value("global_step") == len(losses) == 2
    shown = jobs.events(tmp_path)
    assert shown.Tags()["scalars"] == ["loss"]
    assert shown.Scalars("loss")[0].value == pytest.approx(np.mean(Y[: 2 * BATCH] ** 2))  # the mean over towers


def test_one_tower_takes_the_queue_of_numpy_input_fn(tmp_path):
    batches = tf_estimator.inputs.numpy_input_fn({"x": X}, Y, BATCH, shuffle=False)
    estimator = make(tmp_path, 1).train(batches, steps=3)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(3), atol=1e-12)


def test_one_tower_takes_a_dict_of_tensors_with_keys_of_several_types_as_the_library_does(tmp_path):
    def with_number(features, labels, mode, params):
        return model_fn({"x": features[0]}, features["y"], mode, params)

    estimator = make(tmp_path, 1, with_number).train(lambda: {0: tf.constant(X[:4]), "y": tf.constant(Y[:4])}, steps=1)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(1), atol=1e-9)


def test_a_loss_that_is_not_finite_in_a_later_tower_ends_the_run(tmp_path):
    def bad_batch():
        y = Y.copy()
        y[21] = np.nan  # of the 6th batch: step 3 of two towers, in the second tower
        return tf.data.Dataset.from_tensor_slices(({"x": X}, y)).batch(BATCH)

    with pytest.raises(tf_estimator.NanLossDuringTrainingError):
        make(tmp_path, 2).train(bad_batch)
    assert np.isfinite(weights_of(make(tmp_path))).all()  # of the last checkpoint


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_gpus": 0}, "num_gpus=0: it must be a count of at least 1"),
        ({"num_gpus": 2, "gpus": [0, 1]}, "num_gpus and gpus both say what trains"),
        ({"num_gpus": 2}, "input_fn returned a tuple, of which each tower and worker would get"),
    ],
)
def test_mistakes(tmp_path, settings, match):
    with pytest.raises(errors.UserError, match=match):
        make(tmp_path, **settings).train(lambda: ({"x": tf.constant(X)}, tf.constant(Y)))


class Strategy:
    """A tf.distribute.MirroredStrategy, as far as towers know one, on devices that need not be there."""

    def __init__(self, *devices):
        names = [f"/job:localhost/task:0/device:{name}" for name in devices]
        self.extended = types.SimpleNamespace(worker_devices=names)


@pytest.mark.parametrize("strategy", [tf.distribute.MirroredStrategy(["/cpu:0"]), Strategy("CPU:0", "CPU:1")])
def test_a_strategy_trains_on_towers_one_per_device(tmp_path, strategy):
    towers = len(strategy.extended.worker_devices)
    estimator = make(tmp_path, None, train_distribute=strategy, eval_distribute=strategy).train(input_fn)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(12 // towers, towers), atol=1e-12)
    assert estimator.evaluate(input_fn)["global_step"] == 12 // towers
    assert tf_estimator.RunConfig(train_distribute=Strategy("GPU:1", "GPU:3")).towers == [1, 3]


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
        shown = jobs.events(os.path.join(estimator.model_dir, "eval")).Scalars("mae")
        return calls, [event.step for event in shown], np.array([event.value for event in shown])

    plain, results = tf_estimator.Estimator.__base__, []
    for cls, towers in ((plain, 1), (tf_estimator.Estimator, 2)):
        config = tf_estimator.RunConfig(num_gpus=towers, save_checkpoints_steps=2)
        with compat.replaced(library.estimator, "Estimator", cls):  # by which it looks for overridden members
            results.append(heard(cls(model_fn, str(tmp_path / f"{towers}"), config, {}), towers))
    one, two = results
    assert two[:2] == one[:2] and 5 in two[0]
    np.testing.assert_allclose(two[2], one[2], rtol=1e-5)


tpu = tf_estimator.tpu
SIZES = {"train_batch_size": 2 * BATCH, "eval_batch_size": 6, "predict_batch_size": 16}


def by_size(params):
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(params["batch_size"])


def model(features, labels, mode, params):
    """The regression, with TPUEstimator's metrics, which are a function and its tensors."""
    spec = model_fn(features, labels, mode, params)
    if mode == tf_estimator.ModeKeys.EVAL:
        predicted = v1.get_default_graph().get_tensor_by_name("prediction:0")
        size = tf.fill(tf.shape(labels), params["batch_size"])

        def metrics(labels, predicted, size):
            return {"mae": v1.metrics.mean_absolute_error(labels, predicted), "size": v1.metrics.mean(size)}

        return tpu.TPUEstimatorSpec(mode, loss=spec.loss, eval_metrics=(metrics, [labels, predicted, size]))
    if mode == TRAIN:
        return tpu.TPUEstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op)
    return tpu.TPUEstimatorSpec(mode, predictions=spec.predictions)


def test_a_step_has_its_batch_size_on_any_number_of_towers(tmp_path):
    made = {
        "library": (library.api.tpu.TPUEstimator, tpu.RunConfig(tpu.TPUConfig(7))),
        "one": (tpu.TPUEstimator, tpu.RunConfig(tpu.TPUConfig(7), master="", cluster=None)),
        "two": (tpu.TPUEstimator, tpu.RunConfig(num_gpus=2, tpu_config=tpu.TPUConfig(7))),
        "plain": (tpu.TPUEstimator, tf_estimator.RunConfig(num_gpus=2)),
    }
    results = {}
    for name, (cls, config) in made.items():
        estimator = cls(model, str(tmp_path / name), config, use_tpu=False, **SIZES)
        estimator.train(by_size, max_steps=5)
        np.testing.assert_allclose(weights_of(estimator), expected_weights(5, 2), atol=1e-12)
        if name in ("library", "two"):
            predicted = [row["y"] for row in estimator.predict(by_size)]
            results[name] = estimator.evaluate(by_size) | {"sum": np.sum(predicted)}
            assert results[name]["size"] == 6
    assert results["two"] == pytest.approx(results["library"])


def test_what_it_cannot_do_is_refused_in_one_line(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"use_tpu=True\): TPUs are not supported. Give use_tpu=False"):
        tpu.TPUEstimator(model, str(tmp_path), tpu.RunConfig(), train_batch_size=8)
    with pytest.raises(errors.ConfigError, match=r"train_batch_size=8\): it is shared by 3 towers"):
        tpu.TPUEstimator(model, str(tmp_path), tpu.RunConfig(num_gpus=3), use_tpu=False, train_batch_size=8)
