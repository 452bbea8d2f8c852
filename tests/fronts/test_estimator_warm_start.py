"""warm_start_from counts wherever nothing has been trained yet, and takes what people have: checkpoints and exports."""

import numpy as np
import pytest
import tensorflow as tf
from regression import X, Y, expected_weights, input_fn, make, model_fn

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


def receiver():
    return tf_estimator.export.build_raw_serving_input_receiver_fn({"x": tf.zeros([1, 3], tf.float64)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make(tmp_path_factory.mktemp("trained")).train(input_fn)


@pytest.fixture(scope="module")
def export(trained, tmp_path_factory):
    return trained.export_saved_model(tmp_path_factory.mktemp("export"), receiver())


def warm(model_dir, start):
    return tf_estimator.Estimator(model_fn, model_dir, params={"rate": 1e-30}, warm_start_from=start)


def expected():
    values = expected_weights(12)
    return X @ values[:3] + values[3]


@pytest.mark.parametrize("start", ["model_dir", "checkpoint", "export"])
def test_all_that_computes_before_training_begins_there(tmp_path, trained, export, start):
    starts = {
        "model_dir": trained.model_dir,
        "checkpoint": trained.latest_checkpoint(),
        "export": export,  # bytes, as export_saved_model returns them
    }
    estimator = warm(tmp_path, starts[start])
    found = [p["y"] for p in estimator.predict(input_fn)]
    np.testing.assert_allclose(found, expected(), atol=1e-9)
    assert estimator.evaluate(input_fn)["mae"] == pytest.approx(np.abs(expected() - Y).mean(), abs=1e-6)
    path = estimator.export_saved_model(tmp_path / "export", receiver())
    serve = tf.saved_model.load(path.decode()).signatures["serving_default"]
    np.testing.assert_allclose(serve(x=tf.constant(X))["y"], expected(), atol=1e-9)
    estimator.train(input_fn, steps=1)
    np.testing.assert_allclose(estimator.get_variable_value("weights"), expected_weights(12)[:3], atol=1e-9)


def test_settings_choose_what_is_taken(tmp_path, trained):
    estimator = warm(tmp_path, tf_estimator.WarmStartSettings(trained.model_dir, vars_to_warm_start="weights"))
    [first, *_] = estimator.predict(input_fn)
    assert first["y"] == pytest.approx(X[0] @ expected_weights(12)[:3])


def test_what_is_trained_already_counts_more(tmp_path, trained):
    make(tmp_path).train(input_fn, steps=1)
    assert warm(tmp_path, trained.model_dir).evaluate(input_fn)["global_step"] == 1
