"""tf.estimator.tpu.TPUEstimator without a TPU, beside the library's on one device."""

import numpy as np
import pytest
import tensorflow as tf
from regression import BATCH, TRAIN, X, Y, expected_weights, model_fn, weights_of

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.fronts.tf_estimator import library

v1, tpu = tf.compat.v1, tf_estimator.tpu
SIZES = {"train_batch_size": 2 * BATCH, "eval_batch_size": 6, "predict_batch_size": 16}


def input_fn(params):
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
        estimator.train(input_fn, max_steps=5)
        np.testing.assert_allclose(weights_of(estimator), expected_weights(5, 2), atol=1e-12)
        predicted = [row["y"] for row in estimator.predict(input_fn)]
        results[name] = estimator.evaluate(input_fn) | {"sum": np.sum(predicted)}
        assert results[name]["size"] == 6
    for each in results.values():
        assert each == pytest.approx(results["library"])


def test_what_it_cannot_do_is_refused_in_one_line(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"use_tpu=True\): TPUs are not supported. Give use_tpu=False"):
        tpu.TPUEstimator(model, str(tmp_path), tpu.RunConfig(), train_batch_size=8)
    with pytest.raises(errors.ConfigError, match=r"train_batch_size=8\): it is shared by 3 towers"):
        tpu.TPUEstimator(model, str(tmp_path), tpu.RunConfig(num_gpus=3), use_tpu=False, train_batch_size=8)
