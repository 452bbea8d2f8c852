"""The Estimator: a model_fn, trained on N towers, evaluated and asked for predictions."""

import copy
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import placement
from tower_train.fronts.estimator import model_towers, outputs, saved_model, sessions
from tower_train.fronts.estimator.inputs import Inputs
from tower_train.fronts.estimator.run_config import RunConfig
from tower_train.fronts.estimator.spec import ModeKeys
from tower_train.graph import record
from tower_train.graph.devices import HOST
from tower_train.run import nonfinite
from tower_train.run_dir import checkpoint, events

v1 = tf.compat.v1
_GLOBAL_STEP, _LOSS = "global_step", "loss"


class WarmStartSettings(NamedTuple):
    """What to begin with in place of initial values; the arguments are those of tf.compat.v1.train.warm_start."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: object = ".*"
    var_name_to_vocab_info: dict | None = None
    var_name_to_prev_var_name: dict | None = None


class _Checks(NamedTuple):
    """What nonfinite.NonFiniteGuard needs to know."""

    report: record.StepReport
    checked: tuple[str, ...]
    num_towers: int
    num_workers: int = 1


class Estimator:
    """Trains and evaluates a model that is written as a function.

    Names, arguments and meanings are those of TensorFlow 1.15's tf.estimator.Estimator.

    Args:
      model_fn: (features, labels, mode, params, config) -> EstimatorSpec, or with fewer of these arguments. To train
        it is called once a tower. Variables that it makes with get_variable, tf.Variable or Keras layers are made once,
        and what it assigns to them is assigned once a step, by the first tower; the gradients that it gives to a
        tf.compat.v1.train optimizer are averaged and applied once.
      model_dir: where checkpoints and events are; None takes the config's, or a new temporary one.
      config: a RunConfig.
      params: passed on to model_fn and input_fn.
      warm_start_from: path of a checkpoint or of a model_dir, or WarmStartSettings: what variables begin with
        where model_dir has no checkpoint.

    Raises:
      ConfigError: arguments that cannot be.
    """

    def __init__(self, model_fn: Callable, model_dir=None, config=None, params=None, warm_start_from=None):
        if not callable(model_fn):
            raise errors.ConfigError(f"model_fn must be a function; got {model_fn!r}.")
        config = config or RunConfig()
        if not isinstance(config, RunConfig):
            raise errors.ConfigError(
                f"config must be a tower_train.estimator.RunConfig; got a {type(config).__name__}."
            )
        model_dir = None if model_dir is None else os.fspath(model_dir)
        if model_dir and config.model_dir and model_dir != config.model_dir:
            raise errors.ConfigError(
                f"model_dir={model_dir} and RunConfig's {config.model_dir} differ. Give one of them."
            )
        model_dir = model_dir or config.model_dir
        if not model_dir:
            model_dir = tempfile.mkdtemp()
            v1.logging.warning("No model_dir was given; using the temporary %s.", model_dir)
        self._model_fn, self._params = model_fn, copy.deepcopy(params or {})
        self._config = config.replace(model_dir=model_dir) if config.model_dir != model_dir else config
        if isinstance(warm_start_from, (str, os.PathLike)):
            warm_start_from = WarmStartSettings(os.fspath(warm_start_from))
        self._warm_start = warm_start_from

    @property
    def model_dir(self) -> str:
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def params(self) -> dict:
        """A copy."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable:
        return self._model_fn

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None) -> "Estimator":
        """Trains, from the newest checkpoint on where model_dir has one.

        Args:
          input_fn: returns a tf.data.Dataset of batches (features, labels). Each tower takes the next one: a step
            consumes as many batches as there are towers. Batches at the end that do not suffice for all are left out.
          hooks: session hooks.
          steps: do so many steps more; None goes on until the input ends.
          max_steps: stop at this global step, which may have been reached already; in place of steps.
          saving_listeners: tf.compat.v1.train.CheckpointSaverListeners.

        Returns:
          self.

        Raises:
          UserError: arguments, input or a model that cannot be; the message says how to mend it.
        """
        _check_steps(steps, max_steps)
        newest = self.latest_checkpoint()
        if max_steps is not None and newest and checkpoint.step_of(newest) >= max_steps:
            v1.logging.info("Nothing to train: %s is at or after max_steps=%d.", newest, max_steps)
            return self
        user_hooks = [*_checked_hooks(hooks)]
        if steps or max_steps:
            user_hooks.append(v1.train.StopAtStepHook(steps, max_steps))
        placed = placement.place(self._config.towers, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            specs, captures, inputs = self._build(input_fn, ModeKeys.TRAIN, placed.towers)
            global_step = v1.train.get_global_step()
            train_op, loss, report, checked = model_towers.train_op(specs, captures, global_step)
            if self._warm_start and not newest:
                v1.train.warm_start(*self._warm_start)
            v1.summary.scalar(_LOSS, loss)
            guard = v1.train.NanTensorHook(loss) if report is None else _guard(report, checked, len(specs))
            done = sessions.do_steps(
                specs[0], train_op, loss, self._config, placed, newest, [inputs.hook, *user_hooks, guard],
                saving_listeners,
            )  # fmt: skip
        if not done:
            raise errors.DataError(
                f"input_fn yielded too little to train on: a step takes {len(specs)} batch{'es' * (len(specs) > 1)}, "
                "one a tower. Look at its files and filters, or repeat() the data set."
            )
        return self

    def evaluate(self, input_fn, steps=None, hooks=None, checkpoint_path=None, name=None) -> dict:
        """Evaluates a checkpoint, on one device.

        Args:
          input_fn: as for train.
          steps: evaluate so many batches; None: all.
          hooks: session hooks.
          checkpoint_path: the checkpoint; None: the newest.
          name: of this evaluation, where there are several; its events go to model_dir/eval_NAME.

        Returns:
          {metric: its value over all batches}, among them 'loss', the mean over batches, and 'global_step'.

        Raises:
          UserError: as for train.
        """
        _check_steps(steps, None)
        path = checkpoint_path or self.latest_checkpoint()
        placed = placement.place(1, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            [spec], _, inputs = self._build(input_fn, ModeKeys.EVAL, placed.towers)
            metrics = {**(spec.eval_metric_ops or {}), _LOSS: v1.metrics.mean(spec.loss)}
            update = tf.group([update for _, update in metrics.values()])
            final = v1.train.FinalOpsHook(
                {name: value for name, (value, _) in metrics.items()} | {_GLOBAL_STEP: v1.train.get_global_step()}
            )
            all_hooks = [inputs.hook, *_checked_hooks(hooks), *spec.evaluation_hooks, final]
            done = 0
            with sessions.open_on(path, spec, self._config, placed, all_hooks) as session:
                while not session.should_stop() and done != steps:
                    session.run(update)
                    done += 1
        if not done:
            raise errors.DataError("input_fn yielded no batch to evaluate. Look at its files and filters.")
        values = final.final_ops_values
        writer = events.EventWriter(pathlib.Path(self.eval_dir(name)))
        scalars = {name: value for name, value in values.items() if np.ndim(value) == 0 and name != _GLOBAL_STEP}
        events.add_scalars(writer, scalars, int(values[_GLOBAL_STEP]))
        writer.close()
        return values

    def predict(
        self, input_fn, predict_keys=None, hooks=None, checkpoint_path=None, yield_single_examples=True
    ) -> Iterator:
        """Yields predictions, on one device; the caller's graph and session are not touched in between.

        Args:
          input_fn: as for train; labels are left out.
          predict_keys: which of the predictions; None: all.
          hooks: session hooks.
          checkpoint_path: the checkpoint; None: the newest.
          yield_single_examples: whether to yield example by example, or batches as model_fn returns them.

        Raises:
          UserError: as for train.
        """
        path = checkpoint_path or self.latest_checkpoint()
        placed = placement.place(1, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            [spec], _, inputs = self._build(input_fn, ModeKeys.PREDICT, placed.towers)
            fetched = outputs.chosen(spec.predictions, predict_keys)
            all_hooks = [inputs.hook, *_checked_hooks(hooks), *spec.prediction_hooks]
            session = sessions.open_on(path, spec, self._config, placed, all_hooks)
        try:
            while not session.should_stop():
                try:
                    batch = session.run(fetched)
                except (tf.errors.OutOfRangeError, StopIteration):
                    break
                yield from outputs.examples(batch) if yield_single_examples else [batch]
        finally:
            session.close()

    def export_saved_model(
        self, export_dir_base, serving_input_receiver_fn, assets_extra=None, as_text=False, checkpoint_path=None
    ) -> bytes:
        """Writes a SavedModel of a checkpoint into a new directory, named by the time, under export_dir_base.

        Args:
          export_dir_base: where.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: {path within the export's assets.extra: file to copy there}.
          as_text: whether to write text in place of binary protocol buffers.
          checkpoint_path: the checkpoint; None: the newest.

        Returns:
          The path of the new directory.

        Raises:
          RunError: there is no checkpoint.
        """
        path = checkpoint_path or self._trained()
        with tf.Graph().as_default(), tf.device(HOST):
            v1.train.create_global_step()
            receiver = serving_input_receiver_fn()
            [spec], _ = model_towers.build_towers(
                self._caller(ModeKeys.PREDICT), lambda: (receiver.features, None), (HOST,), self._config.tf_random_seed
            )
            sessions.check_fits(spec, path)
            return saved_model.write(os.fspath(export_dir_base), receiver, spec, path, assets_extra or {}, as_text)

    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint; None where there is none."""
        return checkpoint.latest(pathlib.Path(self.model_dir))

    def get_variable_names(self) -> list[str]:
        """The names of the variables in the newest checkpoint.

        Raises:
          RunError: there is none.
        """
        return [name for name, _ in tf.train.list_variables(self._trained())]

    def get_variable_value(self, name: str) -> np.ndarray:
        """A variable's value in the newest checkpoint.

        Raises:
          RunError: there is none.
        """
        return tf.train.load_variable(self._trained(), name)

    def eval_dir(self, name: str | None = None) -> str:
        """Where `evaluate` writes its events."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def _build(self, input_fn, mode: str, devices: tuple[str, ...]):
        """The towers' specs, what they did to variables, and their inputs, in the default graph."""
        v1.set_random_seed(self._config.tf_random_seed)
        v1.train.create_global_step()
        arguments = {"mode": mode, "params": self.params, "config": self._config}
        inputs = Inputs(input_fn, arguments, with_labels=mode != ModeKeys.PREDICT)
        specs, captures = model_towers.build_towers(
            self._caller(mode), inputs.next_batch, devices, self._config.tf_random_seed
        )
        return specs, captures, inputs

    def _caller(self, mode: str) -> Callable:
        def call(features, labels):
            return model_towers.call_model_fn(self._model_fn, features, labels, mode, self.params, self._config)

        return call

    def _trained(self) -> str:
        path = self.latest_checkpoint()
        if not path:
            raise errors.RunError(f"model_dir={self.model_dir} holds no checkpoint. Train first.")
        return path


def _guard(report: record.StepReport, checked: tuple[str, ...], num_towers: int) -> nonfinite.NonFiniteGuard:
    return nonfinite.NonFiniteGuard(_Checks(report, checked, num_towers))


def _check_steps(steps, max_steps) -> None:
    if steps is not None and max_steps is not None:
        raise errors.ConfigError(
            f"steps={steps} and max_steps={max_steps} exclude each other: steps counts from here, max_steps from the "
            "very first step. Give one of them."
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value <= 0:
            raise errors.ConfigError(f"{name}={value}; it must be above 0, or None.")


def _checked_hooks(given) -> list[v1.train.SessionRunHook]:
    for hook in given or ():
        if not isinstance(hook, v1.train.SessionRunHook):
            raise errors.ConfigError(f"hooks: got {hook!r}; each must be a tf.compat.v1.train.SessionRunHook.")
    return list(given or ())
