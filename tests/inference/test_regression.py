"""A regression from its first step to its export: the best is the least error, and outputs are numbers. Examples of
several classes at once."""

import dataclasses

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

import tower_train
from tower_train import DataRequest, Examples, Workload, errors, evaluate, export, predict, train
from tower_train.config import EvaluateOptions, ExportOptions, RunOptions
from tower_train.inference import example_files, saved_model, serving

v1 = tf.compat.v1
X = np.linspace(-3, 3, 300, dtype=np.float32)[:, np.newaxis]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose last steps are so hasty that its best evaluation is an earlier one."""
    directory = tmp_path_factory.mktemp("sine") / "run"
    options = dict(batch_size=64, summary_every_steps=0, eval_every_steps=100, keep_best=True, check_towers="never")
    for changes in (dict(max_steps=300), dict(max_steps=400, learning_rate=1.0)):
        config = toy_workload.SINE.config(train_dir=str(directory), **(options | changes))
        train("toy_workload:SINE", config)
    return directory


def outputs(directory, x):
    found = jobs.variables(directory, jobs.read_json(directory, "best.json")["best"]["step"])
    layers = [
        [found[f"{name}/{part}/ExponentialMovingAverage"] for part in ("weights", "biases")]
        for name in ("hidden", "out")
    ]
    (first, shift), (second, last) = layers
    return (np.tanh(x @ first + shift) @ second + last)[:, 0]


def test_the_best_is_the_least_error(run, command):
    best = jobs.read_json(run, "best.json")
    assert (best["metric"], best["mode"], best["last"]["step"]) == ("absolute error", "min", 400)
    assert best["best"]["step"] < 400 and best["best"]["value"] < best["last"]["value"] / 2
    assert f"model.ckpt-{best['best']['step']}.index" in {path.name for path in (run / "best").iterdir()}
    status, stdout, stderr = command(evaluate, f"--train_dir={run}", "--best")
    assert (status, stderr) == (0, "") and "confusion" not in stdout
    fetch = toy_workload.load_sine(DataRequest("test")).first(512)
    error = np.abs(outputs(run, fetch[0]) - fetch[1]).mean()
    assert error < 0.1
    found = jobs.read_json(run, "result.json")["evaluation"]["metrics"]["absolute error"]
    assert found["mean"] == pytest.approx(error, rel=1e-4) and found["mode"] == "min"


def test_predict_gives_a_number_for_each_row(run, command, tmp_path):
    np.save(tmp_path / "x.npy", X)
    status, stdout, stderr = command(predict, f"--train_dir={run}", "--best", str(tmp_path / "x.npy"))
    assert (status, stderr) == (0, "")
    names, values = zip(*(line.rsplit(": ", 1) for line in stdout.splitlines()), strict=True)
    assert names[0] == f"{tmp_path}/x.npy[0]" and names[-1] == f"{tmp_path}/x.npy[299]"
    np.testing.assert_allclose([float(value) for value in values], outputs(run, X), atol=1e-5)


def test_predict_says_what_it_takes_in_one_line(run, refusal, tmp_path):
    takes = "this run's network takes float32 [examples, 1]."
    for name, array, message in (
        ("wide.npy", np.ones([3, 2]), f"features is float64 [3, 2]; {takes}"),
        ("one.npy", np.array(1.0), f"features is float64 []; {takes}"),
        ("text.npy", np.array([["a"]]), takes),
        ("image.png", None, "examples are no images. Give a .npy or .npz file that holds features [examples, 1]."),
        ("no.npy", None, "no.npy: holds no arrays that numpy can read"),
    ):
        (tmp_path / name).write_text("no array")
        if array is not None:
            np.save(tmp_path / name, array)
        assert message in refusal(predict, f"--train_dir={run}", str(tmp_path / name))


def test_it_is_exported_with_its_raw_outputs(run, command, tmp_path):
    status, stdout, stderr = command(export, f"--train_dir={run}", "--best", f"--export_dir={tmp_path / 'model'}")
    assert (status, stderr) == (0, "")
    assert stdout == f"Exported: {tmp_path / 'model'} (signatures serving_default, predict)\n"
    signatures = tf.saved_model.load(str(tmp_path / "model")).signatures
    for name in ("serving_default", "predict"):
        found = signatures[name](features=tf.constant(X))
        assert found.keys() == {"outputs"} and found["outputs"].shape == (300, 1)
        np.testing.assert_allclose(found["outputs"][:, 0], outputs(run, X), atol=1e-5)


def test_features_and_outputs_of_several_tensors_keep_their_names(tmp_path):
    features = {"b": np.ones([8, 2], np.float32), "a": np.arange(8)}

    def network(features, training):
        slope = v1.get_variable("slope", [], initializer=v1.ones_initializer())
        total = slope * (tf.reduce_sum(features["b"], axis=1) + tf.cast(features["a"], tf.float32))
        return {"sum": total, "twice": 2 * total}

    workload = Workload(
        "several",
        lambda request: Examples.from_arrays(request.split, features, X[:8, 0]),
        network,
        loss=lambda outputs, labels: tf.reduce_mean(outputs["sum"]) * 0,
    )
    jobs.train_toy(tmp_path / "run", workload=workload, num_gpus=1, max_steps=1)
    folder, _ = saved_model.export_run(ExportOptions(train_dir=str(tmp_path / "run")), workload)
    served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    found = served(a=tf.constant([5], tf.int64), b=tf.constant([[1.0, 2.0]]))
    assert {name: float(value[0]) for name, value in found.items()} == {"sum": 8.0, "twice": 16.0}
    with pytest.raises(
        errors.DataError, match="x.npy: holds one array without a name; an example of this run has b, a"
    ):
        list(example_files.batches("x.npy", {None: X}, None, {"b": None, "a": None}))


def test_a_direction_of_no_metric_is_refused(tmp_path):
    workload = dataclasses.replace(toy_workload.SINE, mode={"of by": "min"})
    with pytest.raises(ValueError, match="mode names 'of by', but its metrics are absolute error, squared error. Name"):
        jobs.train_toy(tmp_path, workload=workload, num_gpus=1, eval_every_steps=5, max_steps=5)


NAMES = ("rain", "wind", "snöw")


def examples(request):
    features = np.random.default_rng(len(request.split)).normal(size=[60, 3]).astype(np.float32)
    return Examples.from_arrays(f"weather {request.split}", features, np.int32(features > 0.3), NAMES)


def workload(activation=None):
    def build():
        inputs = keras.Input([3])
        return keras.Model(inputs, keras.layers.Dense(3, activation)(inputs))

    def f1(outputs, labels):
        """van Rijsbergen 1979: 2 TP / (predicted + true)."""
        predicted = outputs > (0 if activation is None else 0.5)
        return 2 * (predicted & (labels == 1)).sum(axis=0) / (predicted.sum(axis=0) + labels.sum(axis=0))

    loss = keras.losses.BinaryCrossentropy(from_logits=activation is None)
    metrics = [f1, keras.metrics.AUC(multi_label=True, from_logits=activation is None, name="auc")]
    return Workload("weather", examples, tower_train.keras_network(build), loss, metrics)


def test_metrics_and_probabilities_are_by_name(tmp_path):
    """Of a network that ends in logits or, evaluated from the same checkpoint, in their sigmoids."""
    options = dict(batch_size=20, max_steps=20, learning_rate=0.5, ema=0.0, eval_at_end=True, check_towers="never")
    result = tower_train.train(workload(), workload().config(train_dir=str(tmp_path), **options))
    assert {f"val_f1 {name}" for name in NAMES} <= result.history.keys()
    features, labels = examples(tower_train.DataRequest("test")).first(60)
    for activation in (None, "sigmoid"):
        made = workload(activation)
        built, session = serving.open_run(RunOptions(train_dir=str(tmp_path)), made)
        with session:
            found = session.run(built.outputs, {built.features["features"]: features})
            kernel, bias = session.run([built.restored["dense/kernel"], built.restored["dense/bias"]])
        assert built.class_names == NAMES and set(found) == {"logits", "probabilities", "all_classes"}
        logits = features @ kernel + bias
        np.testing.assert_allclose(found["logits"], logits, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found["probabilities"], 1 / (1 + np.exp(-logits)), rtol=1e-5, atol=1e-6)
        right = ((logits > 0) & (labels == 1)).sum(axis=0)
        f1 = 2 * right / ((logits > 0).sum(axis=0) + labels.sum(axis=0))
        [evaluated] = tower_train.evaluate_run(EvaluateOptions(train_dir=str(tmp_path)), made)
        assert [evaluated.metrics[f"f1 {name}"].mean for name in NAMES] == pytest.approx(f1.tolist())
    folder, _ = saved_model.export_run(ExportOptions(train_dir=str(tmp_path)), made)
    served = tf.saved_model.load(str(folder)).signatures["serving_default"](features=tf.constant(features))
    np.testing.assert_array_equal(served["all_classes"][0].numpy(), [name.encode() for name in NAMES])
