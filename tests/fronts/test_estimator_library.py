"""The private names of the Estimator library that the front overrides, replaces and reads exist as it takes them."""

import importlib
import inspect
import types

import pytest
import tensorflow as tf
from tensorflow.python.training import training

from tower_train import estimator as tf_estimator
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


def test_what_tensorflow_dropped_is_put_in_place():
    from tensorflow.python.distribute import estimator_training
    from tensorflow.python.util import tf_export

    assert not estimator_training.should_run_distribute_coordinator(tf_estimator.RunConfig())
    assert tf_export.ESTIMATOR_API_NAME in tf_export.API_ATTRS.keys() & tf_export.API_ATTRS_V1.keys()
    assert importlib.import_module("tensorflow_estimator.python.estimator.tpu.tpu_estimator").TPUEstimator


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("_call_input_fn", "input_fn mode input_context"),
        ("_call_model_fn", "features labels mode config"),
        ("_get_features_and_labels_from_input_fn", "input_fn mode"),
        ("_maybe_warm_start", "checkpoint_path"),
        (
            "_train_with_estimator_spec",
            "estimator_spec worker_hooks hooks global_step_tensor saving_listeners",
        ),
        ("_export_all_saved_models", "export_dir_base input_receiver_fn_map assets_extra as_text checkpoint_path "
         "strip_default_attrs"),
    ],
)  # fmt: skip
def test_methods_of_an_estimator(method, arguments):
    [_, theirs] = [vars(cls)[method] for cls in tf_estimator.Estimator.__mro__ if method in vars(cls)]
    assert list(inspect.signature(theirs).parameters) == ["self", *arguments.split()]


def test_attributes_of_an_estimator_and_its_config(tmp_path):
    made = tf_estimator.Estimator(lambda features: None, str(tmp_path))
    names = {"_config", "_session_config", "_model_fn", "_model_dir", "_params", "_warm_start_settings"}
    assert names <= vars(made).keys() and {"_cluster_spec", "_task_type", "_task_id"} <= vars(made.config).keys()
    assert library.estimator._load_global_step_from_checkpoint_dir(str(tmp_path)) == 0
    assert made._train_distribution is None and made._eval_distribution is None


def test_an_executor_of_train_and_evaluate():
    executor = library.training._TrainingExecutor
    for name in ("run", "run_chief", "run_worker", "run_local", "_start_std_server"):
        assert callable(getattr(executor, name))
    assert library.training._MAX_DELAY_SECS > 0
    assert "_TrainingExecutor" in library.training.train_and_evaluate.__code__.co_names


def test_a_session_is_opened_by_another_function():
    with compat.replaced(training, "MonitoredTrainingSession", dict):
        assert library.estimator.training.MonitoredTrainingSession(master="a") == {"master": "a"}


def test_a_stop_is_withdrawn_and_iterators_have_hooks():
    context = v1.train.SessionRunContext(None, None)
    context.request_stop()
    context._stop_requested = False
    assert not context.stop_requested
    with tf.Graph().as_default(), v1.Session() as session:
        iterator = v1.data.make_initializable_iterator(tf.data.Dataset.range(1))
        hook = library.util._DatasetInitializerHook(iterator)
        hook.begin()
        hook.after_create_session(session, None)
        assert session.run(iterator.get_next()) == 0


def test_losses_tell_that_they_are_sums():
    def of_the_user(features):
        pass

    canned = types.FunctionType(of_the_user.__code__, {"__name__": library.optimizers.__name__})
    for reduction, expected in (("weighted_sum", True), ("weighted_sum_over_batch_size", False)):
        with tf.Graph().as_default():
            v1.losses.compute_weighted_loss(tf.ones([2]), reduction=reduction)
            assert library.is_summed(canned) is expected and not library.is_summed(of_the_user)
