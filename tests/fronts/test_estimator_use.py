"""Estimators evaluate, predict, warm-start and export by checkpoints as TensorFlow 1.15 documented."""

import os
import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import X, Y, expected_weights, input_fn, make, model_fn

from tower_train import errors
from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make(tmp_path_factory.mktemp("trained"), 2).train(input_fn)


def errors_of(count=48):
    values = expected_weights(6, 2)
    return X[:count] @ values[:3] + values[3] - Y[:count]


def test_metrics_are_over_all_batches_and_the_loss_is_their_mean(trained):
    found = trained.evaluate(lambda: input_fn(batch=20), name="test")
    by_batch = np.split(errors_of() ** 2, [20, 40])
    assert found.keys() == {"mae", "loss", "global_step"}
    assert found["mae"] == pytest.approx(np.abs(errors_of()).mean(), abs=1e-6)
    assert found["loss"] == pytest.approx(np.mean([batch.mean() for batch in by_batch]), abs=1e-6)
    assert found["global_step"] == 6
    shown = jobs.events(pathlib.Path(trained.model_dir, "eval_test"))
    [event] = shown.Scalars("mae")
    assert (event.step, event.value) == (6, pytest.approx(found["mae"]))
    [path] = shown.Tensors("checkpoint_path")
    assert path.tensor_proto.string_val == [f"{trained.model_dir}/model.ckpt-6".encode()]


def test_predict_yields_examples_by_keys_and_leaves_the_callers_graph_alone(trained):
    predictions = trained.predict(lambda: input_fn(batch=7))
    first = next(predictions)
    assert tf.executing_eagerly() and v1.get_default_session() is None
    rest = list(predictions)
    assert first.keys() == {"y", "twice"} and len(rest) == 47
    np.testing.assert_allclose([p["y"] for p in [first, *rest]], errors_of() + Y, atol=1e-9)
    chosen = list(trained.predict(input_fn, predict_keys=["twice"], yield_single_examples=False))
    assert [batch["twice"].shape for batch in chosen] == [(4,)] * 12 and chosen[0].keys() == {"twice"}


@pytest.mark.parametrize(
    ("name", "shape", "there"), [("further", [2], "missing"), ("weights", [3, 2], r"float64\[3\]")]
)
def test_a_changed_model_does_not_fit_an_old_model_dir(tmp_path, name, shape, there):
    make(tmp_path).train(input_fn, steps=1)

    def changed(features, labels, mode, params):
        extra = 0 * tf.reduce_sum(v1.get_variable(name, shape, tf.float64))
        with v1.variable_scope("other" if name == "weights" else v1.get_variable_scope()):
            return model_fn({"x": features["x"] + extra}, labels, mode, params)

    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    for act in (
        lambda estimator: estimator.train(input_fn),
        lambda estimator: estimator.evaluate(input_fn),
        lambda estimator: next(estimator.predict(input_fn)),
        lambda estimator: estimator.export_saved_model(tmp_path / "export", receiver),
    ):
        with pytest.raises(errors.ConfigError, match=f"variable {name} is .*; there it is {there}") as caught:
            act(make(tmp_path, fn=changed))
        assert "\n" not in str(caught.value)


def test_all_that_computes_before_training_begins_with_a_warm_start(tmp_path, trained):
    config, params = tf_estimator.RunConfig(num_gpus=2), {"rate": 1e-30}
    estimator = tf_estimator.Estimator(model_fn, tmp_path, config, params, warm_start_from=trained.model_dir)
    y, values = errors_of() + Y, expected_weights(6, 2)
    np.testing.assert_allclose([p["y"] for p in estimator.predict(input_fn)], y, atol=1e-9)
    assert estimator.evaluate(input_fn)["mae"] == pytest.approx(np.abs(y - Y).mean(), abs=1e-6)
    estimator.train(input_fn, steps=1)
    np.testing.assert_allclose(estimator.get_variable_value("weights"), values[:3], atol=1e-9)


def test_an_export_reloads_in_eager_tensorflow(tmp_path, trained):
    y = errors_of() + Y
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    (tmp_path / "notes.txt").write_text("hello")
    base = os.fsencode(tmp_path)  # such as an earlier export's path, which is bytes
    path = trained.export_saved_model(base, receiver, assets_extra={"notes.txt": tmp_path / "notes.txt"})
    serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"], y, atol=1e-9)
    assert pathlib.Path(path.decode(), "assets.extra", "notes.txt").read_text() == "hello"
    parsing = tf_estimator.export.build_parsing_serving_input_receiver_fn({"x": tf.io.FixedLenFeature([3], tf.float32)})
    with pytest.raises(TypeError):  # the model computes in float64: nothing is converted behind its back
        trained.export_saved_model(tmp_path, parsing)


def test_train_and_evaluate_evaluates_and_exports_what_it_trains_and_again_after_a_restart(tmp_path):
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    better = []

    def is_better(best_eval_result, current_eval_result):
        better.append((best_eval_result["loss"], current_eval_result["loss"]))
        return current_eval_result["loss"] < best_eval_result["loss"]

    exporters = [
        tf_estimator.LatestExporter("latest", receiver, exports_to_keep=1),
        tf_estimator.FinalExporter("final", receiver),
        tf_estimator.BestExporter("best", receiver, compare_fn=is_better),
    ]

    def run(max_steps, exporters):
        train = tf_estimator.TrainSpec(lambda: input_fn(epochs=None), max_steps=max_steps)
        evaluate = tf_estimator.EvalSpec(input_fn, steps=None, exporters=exporters, throttle_secs=0)
        return tf_estimator.train_and_evaluate(make(tmp_path, 2, save_checkpoints_steps=4), train, evaluate)

    result, exported = run(8, exporters)
    assert result["global_step"] == 8
    assert [event.step for event in jobs.events(tmp_path / "eval").Scalars("mae")] == [4, 8]
    assert [len(list((tmp_path / "export" / name).iterdir())) for name in ("latest", "final")] == [1, 1]
    assert exported[1].decode() == str(next((tmp_path / "export" / "final").iterdir()))
    assert len(better) == 1 and (exported[2] is not None) == (better[0][1] < better[0][0])
    assert run(8, []) == (None, None)
    best = tf_estimator.BestExporter("best", receiver, compare_fn=is_better)
    result, [exported] = run(12, [best])
    assert result["global_step"] == 12 and exported  # the first after a restart, not compared with itself
    assert all(one != other for one, other in better)
