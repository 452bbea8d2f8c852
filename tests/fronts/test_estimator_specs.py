"""The names of tower_train.estimator are the library's, so that isinstance and subclasses hold."""

import pytest
import tensorflow as tf
from regression import EVAL, input_fn, make, model_fn

from tower_train import estimator as tf_estimator
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


def test_names_are_the_librarys_or_subclasses():
    for module, name in (
        ("model_fn", "EstimatorSpec"), ("training", "EvalSpec"), ("exporter", "BestExporter"),
        ("estimator", "WarmStartSettings"), ("early_stopping", "stop_if_lower_hook"),
    ):  # fmt: skip
        theirs = getattr(getattr(library, module), name)
        assert theirs in (getattr(tf_estimator, name, None), getattr(tf_estimator.experimental, name, None))
    assert issubclass(tf_estimator.DNNClassifier, tf_estimator.Estimator)
    assert issubclass(tf_estimator.DNNClassifier, library.dnn.DNNClassifier)
    assert library.estimator.Estimator is tf_estimator.Estimator  # where the library makes its own
    assert library.run_config.RunConfig is tf_estimator.RunConfig


def test_a_subclass_of_the_users_adds_methods_and_overrides_none(tmp_path):
    class Mine(tf_estimator.Estimator):
        def train_twice(self):
            return self.train(input_fn).train(input_fn)

    class Overrides(tf_estimator.Estimator):
        def train(self, input_fn):
            pass

    assert Mine(model_fn, tmp_path, params={"rate": 0.1}).train_twice().get_variable_value("global_step") == 24
    with pytest.raises(ValueError, match="cannot override members of Estimator"):
        Overrides(model_fn, tmp_path)


def exporter(called):
    class Mine(tf_estimator.Exporter):
        exported = []

        @property
        def name(self):
            return called

        def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
            self.exported.append((export_path, eval_result["global_step"], is_the_final_export))
            return export_path

    return Mine()


def test_a_spec_is_checked_again_when_it_is_changed():
    with tf.Graph().as_default():
        spec = tf_estimator.EstimatorSpec(EVAL, loss=tf.constant(1.0))
        assert spec._replace(predictions={"y": spec.loss}).predictions["y"] is spec.loss
        with pytest.raises(ValueError, match="Loss must be scalar"):
            spec._replace(loss=tf.zeros([2]))


def test_an_exporter_of_1_15_with_a_property_and_no_init(tmp_path):
    mine = exporter("mine")
    specs = tf_estimator.TrainSpec(input_fn, max_steps=3), tf_estimator.EvalSpec(input_fn, exporters=mine)
    result, exported = tf_estimator.train_and_evaluate(make(tmp_path), *specs)
    assert mine.exported == [(f"{tmp_path}/export/mine", 3, True)] and exported == [f"{tmp_path}/export/mine"]
