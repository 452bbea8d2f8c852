"""Hooks that stop early, evaluations without checkpoints, and the names of hooks."""

import pathlib

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import X, Y, expected_weights, input_fn, make

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.run_dir import logs

experimental = tf_estimator.experimental


def with_evaluations(tmp_path, losses):
    """An Estimator whose evaluations gave these losses at steps 10, 20, ..."""
    estimator = make(tmp_path)
    for i, loss in enumerate(losses):
        writer = logs.EventWriter(pathlib.Path(estimator.eval_dir()))  # each evaluation has a file of its own
        logs.add_scalars(writer, {"loss": loss}, 10 * (i + 1))
        writer.close()
    return estimator


def steps_with(estimator, hook):
    estimator.train(lambda: input_fn(epochs=None), hooks=[hook], max_steps=6)
    return int(estimator.get_variable_value("global_step"))


@pytest.mark.parametrize(
    ("make_hook", "value", "losses", "kwargs", "stops"),
    [
        ("stop_if_higher_hook", 2.5, [1, 3, 2], {}, True),
        ("stop_if_higher_hook", 3, [1, 3, 2], {}, False),
        ("stop_if_higher_hook", 2.5, [1, 3, 2], {"min_steps": 30}, False),
        ("stop_if_lower_hook", 1.5, [1, 3, 2], {}, True),
        ("stop_if_lower_hook", 1, [1, 3, 2], {}, False),
        ("stop_if_no_decrease_hook", 20, [3, 1, 2, 1], {}, True),
        ("stop_if_no_decrease_hook", 20, [3, 2, 2, 1], {}, False),
        ("stop_if_no_decrease_hook", 20, [0, 3, 2, 1], {"min_steps": 20}, False),
        ("stop_if_no_increase_hook", 20, [1, 3, 2, 3], {}, True),
        ("stop_if_no_increase_hook", 30, [1, 3, 2, 3], {}, False),
        ("stop_if_no_increase_hook", 10, [], {}, False),
    ],
)
def test_evaluations_stop_the_training(tmp_path, make_hook, value, losses, kwargs, stops):
    estimator = with_evaluations(tmp_path, losses)
    kwargs = {"run_every_secs": None, "run_every_steps": 2} | kwargs
    hook = getattr(experimental, make_hook)(estimator, "loss", value, **kwargs)
    assert steps_with(estimator, hook) == (1 if stops else 6)


def test_a_function_stops_the_training_at_its_interval(tmp_path):
    calls = []
    hook = experimental.make_early_stopping_hook(
        make(tmp_path), lambda: calls.append(1) or len(calls) == 3, run_every_secs=None, run_every_steps=2
    )
    assert steps_with(make(tmp_path), hook) in (4, 5)  # it reads the step before or after the update


def test_early_stopping_within_train_and_evaluate(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=2)
    hook = experimental.stop_if_higher_hook(estimator, "loss", 1e-9, run_every_secs=None, run_every_steps=1)
    train = tf_estimator.TrainSpec(lambda: input_fn(epochs=None), max_steps=50, hooks=[hook])
    result, _ = tf_estimator.train_and_evaluate(estimator, train, tf_estimator.EvalSpec(input_fn, throttle_secs=0))
    assert result["global_step"] == 2  # which was saved and evaluated before the hook looks


def test_evaluations_in_memory_are_of_the_variables_as_they_are(tmp_path):
    estimator = make(tmp_path, 2)
    hook = experimental.InMemoryEvaluatorHook(estimator, input_fn, name="now", every_n_iter=2)
    estimator.train(lambda: input_fn(epochs=None), steps=3, hooks=[hook])
    found = jobs.events(tmp_path / "eval_now").Scalars("mae")
    values = [expected_weights(step, 2) for step in (0, 2, 3)]
    expected = [np.abs(X @ v[:3] + v[3] - Y).mean() for v in values]
    assert [event.step for event in found] == [0, 2, 3]
    np.testing.assert_allclose([event.value for event in found], expected, atol=1e-6)


def test_a_step_to_stop_at_and_functions_of_logits(tmp_path):
    estimator = make(tmp_path)
    assert steps_with(estimator, experimental.make_stop_at_checkpoint_step_hook(estimator, 4)) == 4
    call = experimental.call_logit_fn
    assert call(lambda features, mode: features[mode], {"eval": tf.constant(3)}, "eval", {}, None) == 3


def test_hooks_are_tensorflows_own():
    for name in ("FeedFnHook", "GlobalStepWaiterHook", "NanLossDuringTrainingError", "SecondOrStepTimer"):
        assert getattr(tf_estimator, name) is getattr(tf.compat.v1.train, name)


def test_a_loss_that_is_not_finite_is_also_1_15s_error(tmp_path):
    def bad_batch():
        return tf.data.Dataset.from_tensor_slices(({"x": X}, Y * np.nan)).batch(4)

    with pytest.raises(tf_estimator.NanLossDuringTrainingError, match="not finite at step 1") as caught:
        make(tmp_path, 2).train(bad_batch)
    assert isinstance(caught.value, errors.NonFiniteError)
