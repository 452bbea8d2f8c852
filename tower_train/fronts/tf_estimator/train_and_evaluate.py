"""train_and_evaluate: training with an evaluation, and exports, after checkpoints."""

import math
import numbers
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator import arguments
from tower_train.fronts.tf_estimator.exporters import Exporter
from tower_train.fronts.tf_estimator.task import EVALUATOR
from tower_train.fronts.tf_estimator.tower_estimator import Estimator, step_of

v1 = tf.compat.v1
_LOOK_SECS = 1.0  # between looks of an evaluator for a new checkpoint


class _Train(NamedTuple):
    input_fn: Callable
    max_steps: int | None = None
    hooks: Sequence[v1.train.SessionRunHook] = ()
    saving_listeners: Sequence[v1.train.CheckpointSaverListener] = ()


class TrainSpec(_Train):
    """Arguments of Estimator.train; ConfigError if one is of another kind."""

    __slots__ = ()

    def __new__(cls, *args, **kwargs):
        spec = super().__new__(cls, *args, **kwargs)
        arguments.check_input_fn(spec.input_fn)
        arguments.check_steps(None, spec.max_steps)
        return spec._replace(
            hooks=tuple(arguments.checked_hooks(spec.hooks)),
            saving_listeners=tuple(arguments.checked_listeners(spec.saving_listeners)),
        )


class _Eval(NamedTuple):
    input_fn: Callable
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[v1.train.SessionRunHook] = ()
    exporters: Exporter | Sequence[Exporter] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600


class EvalSpec(_Eval):
    """Arguments of Estimator.evaluate, and the exporters.

    Args:
      input_fn, steps, name, hooks: as for Estimator.evaluate.
      exporters: an Exporter or several, of different names; each may export the evaluated model.
      start_delay_secs: seconds that an evaluator task waits before it begins.
      throttle_secs: least seconds between the starts of evaluations; new checkpoints in between are left out.

    Raises:
      ConfigError: an argument is of another kind, or two exporters have one name.
    """

    __slots__ = ()

    def __new__(cls, *args, **kwargs):
        spec = super().__new__(cls, *args, **kwargs)
        arguments.check_input_fn(spec.input_fn)
        arguments.check_steps(spec.steps)
        if spec.name is not None and not isinstance(spec.name, str):
            raise errors.ConfigError(f"EvalSpec: name={spec.name!r}; it must be a string, or None.")
        for name in ("start_delay_secs", "throttle_secs"):
            value = getattr(spec, name)
            if not isinstance(value, numbers.Real) or value < 0:
                raise errors.ConfigError(f"EvalSpec: {name}={value!r}; it must be a number of seconds, 0 or more.")
        hooks = tuple(arguments.checked_hooks(spec.hooks))
        return spec._replace(hooks=hooks, exporters=_checked_exporters(spec.exporters))


def _checked_exporters(exporters) -> tuple[Exporter, ...]:
    found = (exporters,) if isinstance(exporters, Exporter) else exporters or ()
    if not isinstance(found, (tuple, list)) or not all(isinstance(exporter, Exporter) for exporter in found):
        raise errors.ConfigError(f"EvalSpec: exporters={exporters!r}; it must be an Exporter or a list of Exporters.")
    names = [exporter.name for exporter in found]
    for name in names:
        if not name or not isinstance(name, str) or names.count(name) > 1:
            raise errors.ConfigError(
                f"EvalSpec: the exporters are named {names}; each needs a name of its own, which is its directory in "
                "model_dir/export."
            )
    return tuple(found)


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> tuple:
    """Trains, evaluates checkpoints during training and the last one, and exports.

    A process by itself does all of that, as does a TF_CONFIG's master with its workers. A chief and its workers only
    train; the task of type evaluator evaluates each new checkpoint, until it has evaluated one of max_steps.

    Returns:
      The last evaluation's result and the list of its exporters' results; (None, []) if this process did not evaluate.

    Raises:
      UserError: as Estimator.train and Estimator.evaluate.
    """
    given = (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    )
    for name, value, kind in given:
        if not isinstance(value, kind):
            raise errors.ConfigError(f"{name} must be a {kind.__name__}; got a {type(value).__name__}.")
    config, evaluating = estimator.config, _Evaluating(estimator, eval_spec, train_spec.max_steps)
    if config.task_type == EVALUATOR:
        _watch(estimator, evaluating, eval_spec, config.task_id)
    else:
        is_alone = config.num_worker_replicas == 1 and config.task_type == "worker"
        listeners = [*train_spec.saving_listeners, *([evaluating] if is_alone or config.task_type == "master" else [])]
        estimator.train(
            train_spec.input_fn, hooks=train_spec.hooks, max_steps=train_spec.max_steps, saving_listeners=listeners
        )
    return evaluating.result, evaluating.exported


def _watch(estimator: Estimator, evaluating: "_Evaluating", spec: EvalSpec, index: int) -> None:
    """Evaluates the checkpoints of another process until it has evaluated one of the last step."""
    if index > 0:
        raise errors.ConfigError(f"TF_CONFIG: this is evaluator {index}; there can only be one, number 0.")
    time.sleep(spec.start_delay_secs)
    path, began = None, -math.inf
    while not evaluating.is_over:
        newest = estimator.latest_checkpoint()
        is_throttled = time.monotonic() - began < spec.throttle_secs
        if newest == path or (is_throttled and not evaluating.is_last(step_of(newest))):
            time.sleep(_LOOK_SECS)
            continue
        path, began = newest, time.monotonic()
        evaluating.evaluate(path)


class _Evaluating(v1.train.CheckpointSaverListener):
    """Evaluates checkpoints; as a listener all that are saved, except the untrained model at the beginning.

    Attributes:
      result: of the last evaluation; None if there was none.
      exported: its exporters' results.
      is_over: whether it was of the last step.
    """

    def __init__(self, estimator: Estimator, spec: EvalSpec, max_steps: int | None):
        self._estimator, self._spec, self._max_steps = estimator, spec, max_steps
        self._evaluated_step = self._evaluated_at = self._first_step = None
        self.result, self.exported, self.is_over = None, [], False

    def after_save(self, session, global_step_value):
        if self._first_step is None:
            self._first_step, self._evaluated_at = global_step_value, time.monotonic()
        elif time.monotonic() - self._evaluated_at >= self._spec.throttle_secs:
            self.evaluate(self._estimator.latest_checkpoint())

    def end(self, session, global_step_value):
        if global_step_value not in (self._first_step, self._evaluated_step):
            self.evaluate(self._estimator.latest_checkpoint())

    def is_last(self, step: int) -> bool:
        """Returns whether there is none after this step."""
        return bool(self._max_steps and step >= self._max_steps)

    def evaluate(self, path: str) -> None:
        """Evaluates a checkpoint and has it exported."""
        try:
            self._evaluate(path)
        except Exception:
            console.notice(f"The evaluation or an export of {path} failed.")
            raise

    def _evaluate(self, path: str) -> None:
        spec, estimator = self._spec, self._estimator
        self.result = estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, path, spec.name)
        step = int(self.result["global_step"])
        self._evaluated_step, self._evaluated_at = step, time.monotonic()
        self.is_over = self.is_last(step)
        self.exported = [
            exporter.export(
                estimator, os.path.join(estimator.model_dir, "export", exporter.name), path, self.result, self.is_over
            )
            for exporter in spec.exporters
        ]
