"""Exports of an Estimator, by itself and after the evaluations of train_and_evaluate."""

import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import X, expected_weights, input_fn, make

from tower_train import estimator as tf_estimator


def test_an_export_reloads_in_eager_tensorflow(tmp_path):
    trained = make(tmp_path / "trained", 2).train(input_fn)
    values = expected_weights(6, 2)
    y = X @ values[:3] + values[3]
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    (tmp_path / "notes.txt").write_text("hello")
    path = trained.export_saved_model(tmp_path, receiver, assets_extra={"notes.txt": tmp_path / "notes.txt"})
    serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"], y, atol=1e-9)
    assert pathlib.Path(path.decode(), "assets.extra", "notes.txt").read_text() == "hello"
    parsing = tf_estimator.export.build_parsing_serving_input_receiver_fn({"x": tf.io.FixedLenFeature([3], tf.float32)})
    with pytest.raises(TypeError):  # the model computes in float64: nothing is converted behind its back
        trained.export_saved_model(tmp_path, parsing)


def test_train_and_evaluate_evaluates_and_exports_what_it_trains(tmp_path):
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    better = []

    def is_better(best, now):
        better.append((best["loss"], now["loss"]))
        return now["loss"] < best["loss"]

    exporters = [
        tf_estimator.LatestExporter("latest", receiver, exports_to_keep=1),
        tf_estimator.FinalExporter("final", receiver),
        tf_estimator.BestExporter("best", receiver, compare_fn=is_better),
    ]
    estimator = make(tmp_path, 2, save_checkpoints_steps=4)
    result, exported = tf_estimator.train_and_evaluate(
        estimator,
        tf_estimator.TrainSpec(lambda: input_fn(epochs=None), max_steps=8),
        tf_estimator.EvalSpec(input_fn, steps=None, exporters=exporters, throttle_secs=0),
    )
    assert result["global_step"] == 8
    assert [event.step for event in jobs.events(tmp_path / "eval").Scalars("mae")] == [4, 8]
    assert [len(list((tmp_path / "export" / name).iterdir())) for name in ("latest", "final")] == [1, 1]
    assert exported[1].decode() == str(next((tmp_path / "export" / "final").iterdir()))
    assert len(better) == 1 and (exported[2] is not None) == (better[0][1] < better[0][0])
    nothing = tf_estimator.train_and_evaluate(
        estimator, tf_estimator.TrainSpec(input_fn, max_steps=8), tf_estimator.EvalSpec(input_fn)
    )
    assert nothing == (None, [])
