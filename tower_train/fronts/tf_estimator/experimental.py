"""Extensions of Estimators: `tower_train.estimator.experimental`, and add_metrics."""

import numbers
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import arguments
from tower_train.fronts.tf_estimator.early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from tower_train.fronts.tf_estimator.model_fn import call_with_taken, check_parameters
from tower_train.fronts.tf_estimator.receivers import build_raw_supervised_input_receiver_fn
from tower_train.fronts.tf_estimator.spec import ModeKeys
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1

__all__ = [
    "InMemoryEvaluatorHook", "build_raw_supervised_input_receiver_fn", "call_logit_fn", "make_early_stopping_hook",
    "make_stop_at_checkpoint_step_hook", "stop_if_higher_hook", "stop_if_lower_hook", "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]  # fmt: skip


class InMemoryEvaluatorHook(v1.train.SessionRunHook):
    """Evaluates the current variables during training, without a checkpoint.

    It does so before the first step, at regular intervals, and at the end.

    Args:
      estimator: the one that trains.
      input_fn, steps, hooks, name: as for Estimator.evaluate.
      every_n_iter: steps between evaluations.

    Raises:
      ConfigError: every_n_iter is not above 0.
    """

    def __init__(self, estimator: Estimator, input_fn: Callable, steps=None, hooks=None, name=None, every_n_iter=100):
        arguments.check_input_fn(input_fn)
        if not isinstance(every_n_iter, numbers.Integral) or every_n_iter <= 0:
            raise errors.ConfigError(f"every_n_iter={every_n_iter!r}; it must be a number of steps above 0.")
        self._estimator, self._input_fn, self._every = estimator, input_fn, every_n_iter
        self._arguments = (steps, hooks, name)

    def begin(self):
        self._variables = {variable.op.name: variable.read_value() for variable in v1.global_variables()}
        self._steps, self._evaluated = 0, None

    def after_create_session(self, session, coord):
        self._evaluate(session)

    def after_run(self, run_context, run_values):
        self._steps += 1
        if self._steps % self._every == 0:
            self._evaluate(run_context.session)

    def end(self, session):
        if self._evaluated != self._steps:
            self._evaluate(session)

    def _evaluate(self, session) -> None:
        self._evaluated = self._steps
        self._estimator.evaluate_values(session.run(self._variables), self._input_fn, *self._arguments)


def make_stop_at_checkpoint_step_hook(estimator: Estimator, last_step: int, wait_after_file_check_secs=30):
    """Makes a hook that stops the training at a step.

    Args:
      estimator: the one that trains.
      last_step: the step.
      wait_after_file_check_secs: accepted; a single process need not look at files.
    """
    return v1.train.StopAtStepHook(last_step=last_step)


def call_logit_fn(logit_fn: Callable, features, mode: str, params, config):
    """Calls a logit_fn with the arguments that it takes; GraphError unless it returns a tensor or a dict of them."""
    logits = call_with_taken(logit_fn, features=features, mode=mode, params=params, config=config)
    for tensor in logits.values() if isinstance(logits, dict) else [logits]:
        if not isinstance(tensor, tf.Tensor):
            raise errors.GraphError(f"logit_fn returned {logits!r}; it must return a tensor, or a dict of tensors.")
    return logits


def add_metrics(estimator: Estimator, metric_fn: Callable) -> Estimator:
    """Makes an Estimator like another one, whose evaluations give more metrics.

    Args:
      estimator: the other one.
      metric_fn: (predictions, features, labels, config), or fewer of these -> metrics, as eval_metric_ops of an
        EstimatorSpec. A metric of the same name is replaced.

    Raises:
      ConfigError: metric_fn takes other arguments.
    """
    check_parameters(metric_fn, "metric_fn", ("predictions", "features", "labels", "config"))

    def with_metrics(features, labels, mode, config):
        spec = estimator.model_fn(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        taken = {"features": features, "labels": labels, "predictions": spec.predictions, "config": config}
        return spec._replace(eval_metric_ops=(spec.eval_metric_ops or {}) | call_with_taken(metric_fn, **taken))

    def with_params(features, labels, mode, params, config):
        return with_metrics(features, labels, mode, config)

    fn = with_params if estimator.params else with_metrics
    return Estimator(fn, config=estimator.config, params=estimator.params, warm_start_from=estimator.warm_start_from)
