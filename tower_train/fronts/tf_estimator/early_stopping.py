"""Hooks that stop training by the results of evaluations."""

import operator
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator import eval_events
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> v1.train.SessionRunHook:
    """Makes a hook for the training that regularly asks a function whether to stop.

    Args:
      estimator: the one that trains.
      should_stop_fn: () -> whether to stop.
      run_every_secs: seconds between two calls of it.
      run_every_steps: steps between them, instead; with run_every_secs=None.

    Raises:
      ConfigError: an argument is of another kind, or there is not exactly one interval.
    """
    if not isinstance(estimator, Estimator):
        raise errors.ConfigError(f"estimator must be an Estimator; got a {type(estimator).__name__}.")
    if not callable(should_stop_fn):
        raise errors.ConfigError(f"should_stop_fn must be a function; got {should_stop_fn!r}.")
    if (run_every_secs is None) == (run_every_steps is None):
        raise errors.ConfigError(
            f"run_every_secs={run_every_secs} and run_every_steps={run_every_steps}: give one of them, and None for "
            "the other."
        )
    if not estimator.config.is_chief:  # which reads the evaluations, and ends all workers
        return v1.train.SessionRunHook()
    return _StopOnPredicate(should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator, metric_name, threshold, eval_dir=None, min_steps=0, run_every_secs=60, run_every_steps=None
):
    """Makes a hook that stops the training when an evaluation gives a metric above a threshold.

    Args:
      estimator: the one that trains, and is evaluated.
      metric_name: of the metric, such as 'accuracy'.
      threshold: the value above which to stop.
      eval_dir: the directory of the evaluation's events; None for estimator.eval_dir().
      min_steps: evaluations of earlier steps do not count.
      run_every_secs, run_every_steps: as for make_early_stopping_hook.
    """
    curve = _Curve(estimator, metric_name, eval_dir, min_steps)
    return _on_threshold(operator.gt, threshold, curve, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator, metric_name, threshold, eval_dir=None, min_steps=0, run_every_secs=60, run_every_steps=None
):
    """Makes a hook that stops at a metric below a threshold; the arguments are those of stop_if_higher_hook."""
    curve = _Curve(estimator, metric_name, eval_dir, min_steps)
    return _on_threshold(operator.lt, threshold, curve, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator, metric_name, max_steps_without_increase, eval_dir=None, min_steps=0, run_every_secs=60,
    run_every_steps=None,
):  # fmt: skip
    """Makes a hook that stops the training when a metric has not increased for so many steps.

    Args:
      max_steps_without_increase: steps between the best evaluation and a later one at which to stop.
      others: as for stop_if_higher_hook.
    """
    curve = _Curve(estimator, metric_name, eval_dir, min_steps)
    return _on_standstill(operator.gt, max_steps_without_increase, curve, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator, metric_name, max_steps_without_decrease, eval_dir=None, min_steps=0, run_every_secs=60,
    run_every_steps=None,
):  # fmt: skip
    """Makes a hook that stops when a metric has not decreased; otherwise like stop_if_no_increase_hook."""
    curve = _Curve(estimator, metric_name, eval_dir, min_steps)
    return _on_standstill(operator.lt, max_steps_without_decrease, curve, run_every_secs, run_every_steps)


class _Curve(NamedTuple):
    """A metric over evaluations; the attributes are arguments of stop_if_higher_hook."""

    estimator: Estimator
    metric_name: str
    eval_dir: str | None
    min_steps: int

    def points(self) -> list[tuple[int, float]]:
        """Returns (step, value) of each evaluation; ConfigError if one does not give the metric."""
        evaluations = eval_events.read(pathlib.Path(self.eval_dir or self.estimator.eval_dir()).glob(eval_events.FILES))
        points = [(step, values) for step, values in evaluations if step >= self.min_steps]
        for _, values in points:
            if self.metric_name not in values:
                raise errors.ConfigError(f"metric_name={self.metric_name!r}: the evaluations give {', '.join(values)}.")
        return [(step, values[self.metric_name]) for step, values in points]


def _on_threshold(is_better, threshold: float, curve: _Curve, *every):
    def should_stop():
        crossed = [(step, value) for step, value in curve.points() if is_better(value, threshold)]
        if crossed:
            step, value = crossed[0]
            console.notice(
                f"Stopping early: {curve.metric_name} was {value:g} at step {step}; the threshold is {threshold}."
            )
        return bool(crossed)

    return make_early_stopping_hook(curve.estimator, should_stop, *every)


def _on_standstill(is_better, most_steps: int, curve: _Curve, *every):
    def should_stop():
        best = None
        for step, value in curve.points():
            if best is None or is_better(value, best[1]):
                best = step, value
            elif step - best[0] >= most_steps:
                since = f"best at step {best[0]}, {step - best[0]} steps ago"
                console.notice(f"Stopping early: {curve.metric_name} was {since}.")
                return True
        return False

    return make_early_stopping_hook(curve.estimator, should_stop, *every)


class _StopOnPredicate(v1.train.SessionRunHook):
    """Asks the function at its intervals."""

    def __init__(self, should_stop_fn: Callable, run_every_secs: float | None, run_every_steps: int | None):
        self._should_stop_fn = should_stop_fn
        self._timer = v1.train.SecondOrStepTimer(run_every_secs, run_every_steps)

    def begin(self):
        self._timer.reset()
        self._global_step = v1.train.get_global_step()

    def after_run(self, run_context, run_values):
        step = run_context.session.run(self._global_step)  # within the step it would be that before or after it
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            if self._should_stop_fn():
                run_context.request_stop()
