"""EstimatorSpec, TrainSpec and EvalSpec refuse what would fail later, or worse, not fail."""

import pytest
import tensorflow as tf
from regression import EVAL, PREDICT, TRAIN, input_fn, make

from tower_train import errors
from tower_train import estimator as tf_estimator

v1 = tf.compat.v1


class Hook(tf_estimator.SessionRunHook):
    pass


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


def test_an_estimator_spec_of_the_wrong_kinds():
    with tf.Graph().as_default():
        elsewhere, op = tf.constant(1.0), tf.no_op()
    with tf.Graph().as_default():
        loss, here = tf.constant(1.0), tf.no_op()
        for kwargs, match in [
            ({"loss": 1.0}, "loss is 1.0; it must be a tf.Tensor"),
            ({"loss": elsewhere}, "loss .* is of another graph. Make it within"),
            ({"train_op": "op"}, "train_op is 'op'; it must be a tf.Operation"),
            ({"train_op": op}, "train_op .* is of another graph"),
            ({"predictions": {"y": 1.0}}, r"predictions\['y'\] is 1.0; it must be a tf.Tensor"),
            ({"predictions": elsewhere}, "predictions .* is of another graph"),
            ({"training_hooks": ["hook"]}, "training_hooks holds 'hook'"),
            ({"evaluation_hooks": [tf_estimator.SessionRunHook]}, "evaluation_hooks holds"),
            ({"scaffold": "scaffold"}, "scaffold is 'scaffold'; it must be a tf.compat.v1.train.Scaffold"),
            ({"eval_metric_ops": loss}, "it must be a dict"),
            ({"eval_metric_ops": {"a": (elsewhere, here)}}, "'a'. holds .* not of this graph"),
        ]:
            with pytest.raises(errors.GraphError, match=match) as caught:
                tf_estimator.EstimatorSpec(TRAIN, **({"loss": loss, "train_op": here} | kwargs))
            assert "\n" not in str(caught.value)


def test_a_spec_is_checked_again_when_it_is_changed():
    with tf.Graph().as_default():
        spec = tf_estimator.EstimatorSpec(EVAL, loss=tf.constant(1.0))
        assert spec._replace(predictions={"y": spec.loss}).predictions["y"] is spec.loss
        with pytest.raises(errors.GraphError, match=r"loss has shape \(2,\)"):
            spec._replace(loss=tf.zeros([2]))
        with pytest.raises(errors.GraphError, match="the mode 'eval' cannot become 'train'"):
            spec._replace(mode=TRAIN)


def test_what_is_served_by_default_and_what_cannot_be():
    output = tf_estimator.export.RegressionOutput
    with tf.Graph().as_default():
        y = tf.constant([1.0])
        assert tf_estimator.EstimatorSpec(PREDICT, {"y": y}).export_outputs["serving_default"].outputs == {"y": y}
        one = tf_estimator.EstimatorSpec(PREDICT, y, export_outputs={"head": output(y)})
        assert one.export_outputs.keys() == {"head", "serving_default"} and one.scaffold is not None
        for outputs in (output(y), {"head": y}, {"a": output(y), "b": output(y)}):
            with pytest.raises(errors.GraphError, match="export_outputs cannot be exported"):
                tf_estimator.EstimatorSpec(PREDICT, y, export_outputs=outputs)


def test_defaults_and_sequences_of_specs():
    train, evaluation = tf_estimator.TrainSpec(input_fn), tf_estimator.EvalSpec(input_fn)
    assert train[1:] == (None, (), ()) and evaluation[1:] == (100, None, (), (), 120, 600)
    hooks, both = [Hook()], [exporter("a"), exporter("b")]
    assert tf_estimator.TrainSpec(input_fn, 2, hooks).hooks == tuple(hooks)
    assert tf_estimator.EvalSpec(input_fn, hooks=hooks, exporters=both).exporters == tuple(both)
    assert tf_estimator.EvalSpec(input_fn, exporters=both[0]).exporters == (both[0],)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"input_fn": "input"}, "input_fn is a str; it must be a function"),
        ({"steps": 0}, "steps=0; it must be above 0"),
        ({"name": 123}, "name=123; it must be a string"),
        ({"hooks": [print]}, "each must be a tf.compat.v1.train.SessionRunHook"),
        ({"start_delay_secs": -1}, "start_delay_secs=-1; it must be a number of seconds"),
        ({"throttle_secs": "10"}, "throttle_secs='10'; it must be a number of seconds"),
        ({"exporters": Hook()}, "it must be an Exporter or a list"),
        ({"exporters": [exporter("a"), Hook()]}, "it must be an Exporter or a list"),
        ({"exporters": [exporter("a"), exporter("a")]}, "named .'a', 'a'.; each needs a name of its own"),
        ({"exporters": exporter(None)}, "each needs a name of its own"),
        ({"exporters": exporter(3)}, "each needs a name of its own"),
    ],
)
def test_an_eval_spec_that_cannot_be(kwargs, match):
    with pytest.raises(errors.ConfigError, match=match):
        tf_estimator.EvalSpec(**({"input_fn": input_fn} | kwargs))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"input_fn": 3}, "input_fn is a int; it must be a function"),
        ({"max_steps": 0}, "max_steps=0; it must be above 0"),
        ({"hooks": ["hook"]}, "hooks: got 'hook'"),
        ({"saving_listeners": [Hook()]}, "each must be a tf.compat.v1.train.CheckpointSaverListener"),
    ],
)
def test_a_train_spec_that_cannot_be(kwargs, match):
    with pytest.raises(errors.ConfigError, match=match):
        tf_estimator.TrainSpec(**({"input_fn": input_fn} | kwargs))


def test_an_exporter_of_1_15_with_a_property_and_no_init(tmp_path):
    mine = exporter("mine")
    specs = tf_estimator.TrainSpec(input_fn, max_steps=3), tf_estimator.EvalSpec(input_fn, exporters=mine)
    result, exported = tf_estimator.train_and_evaluate(make(tmp_path), *specs)
    assert mine.exported == [(f"{tmp_path}/export/mine", 3, True)] and exported == [f"{tmp_path}/export/mine"]
    with pytest.raises(errors.ConfigError, match="estimator must be a Estimator; got a str"):
        tf_estimator.train_and_evaluate("estimator", *specs)
