"""Hooks that stop training when evaluations say so."""

import operator
import pathlib
from collections.abc import Callable

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> v1.train.SessionRunHook:
    """Makes a hook for the training that asks a function now and then whether to stop.

    Args:
      estimator: the one that trains.
      should_stop_fn: () -> whether to stop.
      run_every_secs: seconds between two calls of it.
      run_every_steps: steps between them, instead; give run_every_secs=None then.

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
      run_every_secs: as for make_early_stopping_hook.
      run_every_steps: likewise.
    """
    return _on_threshold(
        operator.gt, estimator, metric_name, threshold, eval_dir, min_steps, run_every_secs, run_every_steps
    )


def stop_if_lower_hook(
    estimator, metric_name, threshold, eval_dir=None, min_steps=0, run_every_secs=60, run_every_steps=None
):
    """Makes a hook that stops the training when an evaluation gives a metric below a threshold.

    Args:
      others: as for stop_if_higher_hook.
    """
    return _on_threshold(
        operator.lt, estimator, metric_name, threshold, eval_dir, min_steps, run_every_secs, run_every_steps
    )


def stop_if_no_increase_hook(
    estimator, metric_name, max_steps_without_increase, eval_dir=None, min_steps=0, run_every_secs=60,
    run_every_steps=None,
):  # fmt: skip
    """Makes a hook that stops the training when a metric has not increased for so many steps.

    Args:
      max_steps_without_increase: steps between the best evaluation and a later one at which to stop.
      others: as for stop_if_higher_hook.
    """
    return _on_standstill(
        operator.gt, estimator, metric_name, max_steps_without_increase, eval_dir, min_steps, run_every_secs,
        run_every_steps,
    )  # fmt: skip


def stop_if_no_decrease_hook(
    estimator, metric_name, max_steps_without_decrease, eval_dir=None, min_steps=0, run_every_secs=60,
    run_every_steps=None,
):  # fmt: skip
    """Makes a hook that stops the training when a metric has not decreased for so many steps.

    Args:
      max_steps_without_decrease: steps between the best evaluation and a later one at which to stop.
      others: as for stop_if_higher_hook.
    """
    return _on_standstill(
        operator.lt, estimator, metric_name, max_steps_without_decrease, eval_dir, min_steps, run_every_secs,
        run_every_steps,
    )  # fmt: skip


def _on_threshold(is_better, estimator, metric_name, threshold, eval_dir, min_steps, *every):
    def should_stop():
        crossed = [point for point in _curve(eval_dir or estimator.eval_dir(), metric_name, min_steps)
                   if is_better(point[1], threshold)]  # fmt: skip
        if crossed:
            step, value = crossed[0]
            console.notice(f"Stopping early: {metric_name} was {value:g} at step {step}; the threshold is {threshold}.")
        return bool(crossed)

    return make_early_stopping_hook(estimator, should_stop, *every)


def _on_standstill(is_better, estimator, metric_name, most_steps, eval_dir, min_steps, *every):
    def should_stop():
        best = None
        for step, value in _curve(eval_dir or estimator.eval_dir(), metric_name, min_steps):
            if best is None or is_better(value, best[1]):
                best = step, value
            elif step - best[0] >= most_steps:
                console.notice(f"Stopping early: {metric_name} was best at step {best[0]}, {step - best[0]} steps ago.")
                return True
        return False

    return make_early_stopping_hook(estimator, should_stop, *every)


def read_eval_metrics(eval_dir: str) -> dict[int, dict[str, float]]:
    """Returns the numbers of all evaluations in a directory of events, {step: {metric: value}}, in the steps' order."""
    found = {}
    for path in sorted(pathlib.Path(eval_dir).glob("*.tfevents.*")):
        for event in v1.train.summary_iterator(str(path)):
            numbers = {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}
            if numbers:
                found.setdefault(event.step, {}).update(numbers)
    return dict(sorted(found.items()))


def _curve(eval_dir: str, metric_name: str, min_steps: int) -> list[tuple[int, float]]:
    """Returns (step, value) of a metric over evaluations.

    Raises:
      ConfigError: evaluations do not give it.
    """
    points = [(step, values) for step, values in read_eval_metrics(eval_dir).items() if step >= min_steps]
    for _, values in points:
        if metric_name not in values:
            raise errors.ConfigError(f"metric_name={metric_name!r}: the evaluations give {', '.join(values)}.")
    return [(step, values[metric_name]) for step, values in points]


class _StopOnPredicate(v1.train.SessionRunHook):
    """Asks the function at its intervals."""

    def __init__(self, should_stop_fn: Callable, run_every_secs: float | None, run_every_steps: int | None):
        self._should_stop_fn = should_stop_fn
        self._timer = v1.train.SecondOrStepTimer(run_every_secs, run_every_steps)

    def begin(self):
        self._timer.reset()
        self._global_step = v1.train.get_global_step()

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values):
        step = run_values.results
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            if self._should_stop_fn():
                run_context.request_stop()
