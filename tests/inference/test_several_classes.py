"""Examples of several classes at once: metrics by class, predictions and exports by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import Examples, Workload
from tower_train.config import ExportOptions, RunOptions
from tower_train.inference import saved_model, serving

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


@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_metrics_and_probabilities_are_by_name(activation, tmp_path):
    made = workload(activation)
    options = dict(num_gpus=2, batch_size=10, max_steps=20, learning_rate=0.5, ema=0.0, eval_at_end=True)
    config = made.config(train_dir=str(tmp_path), check_towers="never", **options)
    result = tower_train.train(made, config)
    assert {f"val_f1 {name}" for name in NAMES} <= result.history.keys()
    built, session = serving.open_run(RunOptions(train_dir=str(tmp_path)), made)
    features, labels = examples(tower_train.DataRequest("test")).first(60)
    with session:
        found = session.run(built.outputs, {built.features["features"]: features})
        kernel, bias = session.run([built.restored["dense/kernel"], built.restored["dense/bias"]])
    assert built.class_names == NAMES and set(found) == {"logits", "probabilities", "all_classes"}
    logits = features @ kernel + bias
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found["probabilities"], 1 / (1 + np.exp(-logits)), rtol=1e-5, atol=1e-6)
    right = ((logits > 0) & (labels == 1)).sum(axis=0)
    f1 = 2 * right / ((logits > 0).sum(axis=0) + labels.sum(axis=0))
    assert [result.history[f"val_f1 {name}"][-1] for name in NAMES] == pytest.approx(f1.tolist())
    folder, _ = saved_model.export_run(ExportOptions(train_dir=str(tmp_path)), made)
    served = tf.saved_model.load(str(folder)).signatures["serving_default"](features=tf.constant(features))
    np.testing.assert_array_equal(served["all_classes"][0].numpy(), [name.encode() for name in NAMES])
