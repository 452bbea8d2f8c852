"""eval_metric_ops of all kinds that TensorFlow 1.15 took, and metrics that are added to an Estimator."""

import pathlib

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from regression import EVAL, TRAIN, X, Y, input_fn, make, model_fn

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


def with_metrics(make_metrics, in_training=False):
    def fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        if mode == EVAL or (in_training and mode == TRAIN):
            return spec._replace(eval_metric_ops=make_metrics(features, labels))
        return spec

    return fn


def keras_metrics(features, labels):
    mean = keras.metrics.Mean(name="average")
    mean.update_state(labels)
    error = keras.metrics.MeanAbsoluteError()
    error.update_state(labels[:, tf.newaxis], features["x"][:, :1])
    per_batch = keras.metrics.Mean(name="per_batch")
    per_batch.update_state(tf.reduce_mean(labels))  # its count does not depend on the input
    return {"average": mean, "error": error, "per_batch": per_batch}


@pytest.mark.parametrize("towers", [1, 2])
def test_keras_metrics_are_over_all_batches_and_not_in_checkpoints(tmp_path, towers):
    estimator = make(tmp_path, towers, with_metrics(keras_metrics, in_training=True)).train(input_fn)
    for _ in range(2):  # they begin anew
        found = estimator.evaluate(lambda: input_fn(batch=20))
        assert found["average"] == pytest.approx(Y.mean(), abs=1e-6)
        assert found["error"] == pytest.approx(np.abs(Y - X[:, 0]).mean(), abs=1e-6)
        assert found["per_batch"] == pytest.approx(np.mean([Y[:20].mean(), Y[20:40].mean(), Y[40:].mean()]), abs=1e-6)
    names = estimator.get_variable_names()
    assert not [name for name in names if "average" in name or "error" in name]


def test_keras_metrics_that_cannot_be(tmp_path):
    def never(features, labels):
        return {"average": keras.metrics.Mean()}

    def twice(features, labels):
        mean = keras.metrics.Mean()
        mean.update_state(labels)
        mean.update_state(labels + 1)
        return {"average": mean}

    for fn, message in [(never, "call update_state"), (twice, "called more than once")]:
        with pytest.raises(ValueError, match=message):
            make(tmp_path, fn=with_metrics(fn)).evaluate(input_fn)


def test_images_vectors_and_tuples(tmp_path):
    def metrics(features, labels):
        image = v1.summary.image("image", tf.ones([1, 4, 4, 3]))
        nested = ((tf.constant(2.0), tf.constant(1)), tf.constant(3, tf.float64))
        return {
            "shown": (image, tf.no_op()),
            "vector": (tf.constant([1.0, 2.0]), tf.no_op()),
            "nested": (nested, tf.no_op()),
            "text": (tf.constant("no summary"), tf.no_op()),
        }

    found = make(tmp_path, fn=with_metrics(metrics)).train(input_fn, steps=2).evaluate(input_fn)
    assert found["nested"] == ((2, 1), 3) and list(found["vector"]) == [1, 2]
    assert found["text"] == b"no summary" and isinstance(found["shown"], bytes)
    accumulator = jobs.events(pathlib.Path(tmp_path, "eval"))
    assert accumulator.Tags()["images"] == ["shown/0"]
    [event] = accumulator.Images("shown/0")
    assert (event.step, event.width) == (2, 4)
    assert list(tf.make_ndarray(accumulator.Tensors("vector")[0].tensor_proto)) == [1, 2]


def test_add_metrics(tmp_path):
    seen = []

    def more(labels, predictions, config):
        seen.append((predictions, config.model_dir))
        return {"mean_label": v1.metrics.mean(labels)}

    estimator = make(tmp_path, params={"rate": 2**-5}).train(input_fn)
    extended = tf_estimator.add_metrics(estimator, more)
    found = extended.evaluate(lambda: input_fn(batch=10))
    assert found.keys() == {"mae", "mean_label", "loss", "global_step"}
    assert found["mean_label"] == pytest.approx(Y.mean(), abs=1e-6)
    assert found["mae"] == pytest.approx(estimator.evaluate(input_fn)["mae"])
    assert seen == [({}, str(tmp_path))] and isinstance(extended, tf_estimator.Estimator)


@pytest.mark.parametrize("shape", [[1], [None, 1], None])
def test_a_loss_of_one_number_of_any_shape(tmp_path, shape):
    def fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        return spec._replace(
            loss=v1.placeholder_with_default(tf.reshape(spec.loss, [1, 1][: len(shape or [1])]), shape)
        )

    estimator = make(tmp_path, 2, fn).train(input_fn, steps=1)
    assert estimator.evaluate(input_fn)["loss"] == pytest.approx(make(tmp_path).evaluate(input_fn)["loss"])
