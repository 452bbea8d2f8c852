"""Exports of an Estimator, by itself and after the evaluations of train_and_evaluate."""

import os
import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import EVAL, MOMENTUM, PREDICT, RATE, TRAIN, X, Y, expected_weights, input_fn, make, model_fn
from tensorflow.core.protobuf import saved_model_pb2

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


def test_an_export_reloads_in_eager_tensorflow(tmp_path):
    trained = make(tmp_path / "trained", 2).train(input_fn)
    values = expected_weights(6, 2)
    y = X @ values[:3] + values[3]
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


def test_train_and_evaluate_evaluates_and_exports_what_it_trains(tmp_path):
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
    assert nothing == (None, None)


def supervised():
    return tf_estimator.export.build_supervised_input_receiver_fn_from_input_fn(input_fn)


def test_graphs_for_training_evaluation_and_serving_share_their_variables(tmp_path):
    trained = make(tmp_path / "trained").train(input_fn)
    weights_before = [trained.get_variable_value(f"weights{slot}") for slot in ("", "/Momentum")]
    serving = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    modes = {TRAIN: supervised(), EVAL: supervised(), PREDICT: serving}
    path = trained.experimental_export_all_saved_models(tmp_path, modes).decode()
    values = expected_weights(12)
    error = np.mean((X @ values[:3] + values[3] - Y) ** 2)
    for tags, key in [("train", "train"), ("eval", "eval")]:
        with tf.Graph().as_default(), v1.Session() as session:
            signature = v1.saved_model.load(session, [tags], path).signature_def[key]
            feed = {signature.inputs["x"].name: X, signature.inputs["label"].name: Y}
            assert session.run(signature.outputs["loss"].name, feed) == pytest.approx(error)
            if key == "train":  # it can go on
                session.run(v1.get_collection("saved_model_train_op"), feed)
                grad = 2 * X.T @ (X @ values[:3] + values[3] - Y) / len(X)
                expected = weights_before[0] - RATE * (MOMENTUM * weights_before[1] + grad)
                found = session.run(v1.get_default_graph().get_tensor_by_name("weights/Read/ReadVariableOp:0"))
                np.testing.assert_allclose(found, expected, atol=1e-9)
            else:
                session.run(signature.outputs["metrics/mae/update_op"].name, feed)
                mae = session.run(signature.outputs["metrics/mae/value"].name)
                assert mae == pytest.approx(np.abs(X @ values[:3] + values[3] - Y).mean(), abs=1e-6)
    serve = tf.saved_model.load(path, ["serve"]).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"], X @ values[:3] + values[3], atol=1e-9)
    one = trained.export_saved_model(tmp_path, supervised(), experimental_mode=EVAL)
    assert [graph.meta_info_def.tags for graph in saved(one).meta_graphs] == [["eval"]]
    with pytest.raises(ValueError, match="No valid modes for exporting found"):
        trained.experimental_export_all_saved_models(tmp_path, {"serve": serving})


def saved(path):
    message = saved_model_pb2.SavedModel()
    message.ParseFromString(pathlib.Path(path.decode(), "saved_model.pb").read_bytes())
    return message


def test_the_older_name_keeps_default_attributes_unless_told_not_to(tmp_path):
    trained = make(tmp_path / "trained").train(input_fn, steps=1)
    serving = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})

    def has_defaults(path):
        [graph] = saved(path).meta_graphs
        [node] = [node for node in graph.graph_def.node if node.op == "MatMul"]
        return "transpose_a" in node.attr

    assert has_defaults(trained.export_savedmodel(tmp_path, serving))
    assert not has_defaults(trained.export_savedmodel(tmp_path, serving, strip_default_attrs=True))
    assert not has_defaults(trained.export_saved_model(tmp_path, serving))


def test_ops_on_a_gpu_that_is_not_there_are_exported(tmp_path):
    threads = v1.ConfigProto(intra_op_parallelism_threads=1)

    def on_gpu(features, labels, mode, params):
        with tf.device("/gpu:0"):
            shown = tf.strings.as_string(features["x"][:, 0])  # has no kernel for GPUs
        spec = model_fn(features, labels, mode, params)
        return spec._replace(predictions={"shown": shown}, export_outputs=None) if mode == PREDICT else spec

    trained = make(tmp_path, fn=on_gpu, session_config=threads).train(input_fn, steps=1)
    receiver = tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})
    assert trained.export_saved_model(tmp_path / "export", receiver)


def test_a_model_fn_of_a_single_tensor_is_exported_with_a_tensor_receiver(tmp_path):
    def of_tensor(features, labels, mode, params):
        return model_fn({"x": features}, labels, mode, params)

    def tensor_input_fn():
        return input_fn().map(lambda features, labels: (features["x"], labels))

    trained = make(tmp_path / "trained", fn=of_tensor).train(tensor_input_fn)
    export = tf_estimator.export

    def receive():
        fed = v1.placeholder(tf.float64, [None, 3])
        return export.TensorServingInputReceiver(fed, fed)

    path = trained.export_saved_model(tmp_path, receive)
    serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
    values = expected_weights(12)
    np.testing.assert_allclose(serve(input=tf.constant(X))["y"], X @ values[:3] + values[3], atol=1e-9)
    with tf.Graph().as_default():
        fed = v1.placeholder(tf.float64, [None, 3])
        assert export.ServingInputReceiver(fed, fed).features == {"feature": fed}
