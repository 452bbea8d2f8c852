"""Estimator.evaluate and Estimator.predict compute with a checkpoint what TensorFlow 1.15 documented."""

import os
import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import Recorder, X, Y, expected_weights, input_fn, make, model_fn

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


def test_steps_bound_an_evaluation(trained):
    log = []
    found = trained.evaluate(lambda: input_fn(batch=8), steps=2, hooks=[Recorder(log)])
    assert found["mae"] == pytest.approx(np.abs(errors_of(16)).mean(), abs=1e-6)
    assert log == ["begin", "after_create_session", *["before_run", "after_run"] * 2, "end"]


def test_an_older_checkpoint(trained):
    found = trained.evaluate(input_fn, checkpoint_path=os.path.join(trained.model_dir, "model.ckpt-0"))
    assert found["mae"] == pytest.approx(np.abs(Y).mean(), abs=1e-6)


def test_predict_yields_examples_by_keys_and_leaves_the_callers_graph_alone(trained):
    predictions = trained.predict(lambda: input_fn(batch=7))
    first = next(predictions)
    assert tf.executing_eagerly() and v1.get_default_session() is None
    rest = list(predictions)
    assert first.keys() == {"y", "twice"} and len(rest) == 47
    np.testing.assert_allclose([p["y"] for p in [first, *rest]], errors_of() + Y, atol=1e-9)
    chosen = list(trained.predict(input_fn, predict_keys=["twice"], yield_single_examples=False))
    assert [batch["twice"].shape for batch in chosen] == [(4,)] * 12 and chosen[0].keys() == {"twice"}


def test_predictions_of_tensors_go_on(trained):
    predictions = trained.predict(lambda: {"x": tf.constant(X[:2])})
    found = [next(predictions)["y"] for _ in range(5)]
    np.testing.assert_allclose(found, (errors_of(2) + Y[:2])[[0, 1, 0, 1, 0]], atol=1e-9)


def test_a_changed_model_does_not_fit_an_old_model_dir(tmp_path):
    make(tmp_path).train(input_fn, steps=1)

    def changed(features, labels, mode, params):
        v1.get_variable("further", [2], tf.float64)
        return model_fn(features, labels, mode, params)

    for act in (lambda e: e.train(input_fn), lambda e: e.evaluate(input_fn), lambda e: next(e.predict(input_fn))):
        with pytest.raises(tf.errors.NotFoundError, match="Key further not found in checkpoint"):
            act(make(tmp_path, fn=changed))
