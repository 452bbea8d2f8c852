"""The Estimator: a model_fn, trained on N towers, evaluated and asked for predictions."""

import copy
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import placement
from tower_train.fronts.tf_estimator import arguments, model_fn, model_towers, predictions, saved_model
from tower_train.fronts.tf_estimator.inputs import Inputs
from tower_train.fronts.tf_estimator.monitored_sessions import Sessions, check_fits
from tower_train.fronts.tf_estimator.run_config import RunConfig, WarmStartSettings
from tower_train.fronts.tf_estimator.spec import ModeKeys
from tower_train.graph.devices import HOST
from tower_train.run import nonfinite
from tower_train.run_dir import checkpoint, events

v1 = tf.compat.v1


class Estimator:
    """Trains and evaluates a model that is written as a function.

    Names, arguments and meanings are those of TensorFlow 1.15's tf.estimator.Estimator.

    Args:
      model_fn: (features, labels, mode, params, config) -> EstimatorSpec, or with fewer of these arguments. To train
        it is called once a tower. Variables that it makes with get_variable, tf.Variable or Keras layers are made once,
        and are assigned to once a step, by the first tower; the gradients that it gives to a tf.compat.v1.train
        optimizer are averaged and applied once.
      model_dir: the directory of checkpoints and events; None takes the config's, or a new temporary one.
      config: a RunConfig.
      params: passed on to model_fn and input_fn.
      warm_start_from: path of a checkpoint or of a model_dir, or WarmStartSettings: the values that variables begin
        with if model_dir has no checkpoint.

    Raises:
      ConfigError: arguments that are of another kind, or contradict each other.
    """

    def __init__(self, model_fn: Callable, model_dir=None, config=None, params=None, warm_start_from=None):
        arguments.check_model_fn(model_fn)
        if isinstance(warm_start_from, (str, os.PathLike)):
            warm_start_from = WarmStartSettings(os.fspath(warm_start_from))
        self._model_fn, self._params, self._warm_start = model_fn, copy.deepcopy(params or {}), warm_start_from
        self._config = arguments.config_with_model_dir(config, model_dir)

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
        """Trains, from the newest checkpoint in model_dir if there is one.

        Args:
          input_fn: returns a tf.data.Dataset of batches (features, labels). Each tower takes the next one: a step
            consumes as many batches as there are towers. Batches at the end that do not suffice for all are left out.
          hooks: session hooks.
          steps: do so many steps more; None goes on until the input ends.
          max_steps: stop at this global step, which may have been reached already; instead of steps.
          saving_listeners: tf.compat.v1.train.CheckpointSaverListeners.

        Returns:
          self.

        Raises:
          UserError: wrong arguments, input or model; the message says how to mend it.
        """
        arguments.check_steps(steps, max_steps)
        hooks, newest = arguments.checked_hooks(hooks), self.latest_checkpoint()
        if max_steps is not None and newest and checkpoint.step_of(newest) >= max_steps:
            console.notice(f"Nothing to train: {newest} is at or after max_steps={max_steps}.")
            return self
        if steps or max_steps:
            hooks.append(v1.train.StopAtStepHook(steps, max_steps))
        placed = placement.place(self._config.towers, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            specs, captures, inputs = self._build(input_fn, ModeKeys.TRAIN, placed.towers)
            step = model_towers.train_step(specs, captures)
            if self._warm_start and not newest:
                v1.train.warm_start(*self._warm_start)
            v1.summary.scalar("loss", step.loss)
            guard = nonfinite.NonFiniteGuard(step) if step.report else v1.train.NanTensorHook(step.loss)
            sessions = Sessions(self._config, placed)
            done = sessions.train(step, specs[0], newest, [inputs.hook, *hooks, guard], saving_listeners)
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
          name: of this evaluation, if there are several; its events go to model_dir/eval_NAME.

        Returns:
          {metric: its value over all batches}, among them 'loss', the mean over batches, and 'global_step'.

        Raises:
          UserError: as for train.
        """
        arguments.check_steps(steps, None)
        hooks, path = arguments.checked_hooks(hooks), checkpoint_path or self.latest_checkpoint()
        placed = placement.place(1, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            [spec], _, inputs = self._build(input_fn, ModeKeys.EVAL, placed.towers)
            values = Sessions(self._config, placed).evaluate(path, spec, [inputs.hook, *hooks], steps)
        if not values:
            raise errors.DataError("input_fn yielded no batch to evaluate. Look at its files and filters.")
        scalars = {name: value for name, value in values.items() if np.ndim(value) == 0}
        step = int(scalars.pop("global_step"))
        writer = events.EventWriter(pathlib.Path(self.eval_dir(name)))
        events.add_scalars(writer, scalars, step)
        writer.close()
        return values

    def predict(
        self, input_fn, predict_keys=None, hooks=None, checkpoint_path=None, yield_single_examples=True
    ) -> Iterator:
        """Yields predictions, on one device; the caller's graph and session are not touched in between.

        Args:
          input_fn: as for train; labels are left out.
          predict_keys: the keys of the predictions to yield; None: all.
          hooks: session hooks.
          checkpoint_path: the checkpoint; None: the newest.
          yield_single_examples: whether to yield example by example, or batches as model_fn returns them.

        Raises:
          UserError: as for train.
        """
        hooks, path = arguments.checked_hooks(hooks), checkpoint_path or self.latest_checkpoint()
        placed = placement.place(1, "num_gpus", in_session=True)
        with tf.Graph().as_default(), tf.device(HOST):
            [spec], _, inputs = self._build(input_fn, ModeKeys.PREDICT, placed.towers)
            fetched = predictions.chosen(spec.predictions, predict_keys)
            session = Sessions(self._config, placed).open(path, spec, [inputs.hook, *hooks, *spec.prediction_hooks])
        try:
            while not session.should_stop():
                try:
                    batch = session.run(fetched)
                except (tf.errors.OutOfRangeError, StopIteration):
                    break
                yield from predictions.examples(batch) if yield_single_examples else [batch]
        finally:
            session.close()

    def export_saved_model(
        self, export_dir_base, serving_input_receiver_fn, assets_extra=None, as_text=False, checkpoint_path=None
    ) -> bytes:
        """Writes a SavedModel of a checkpoint into a new directory, named by the time, under export_dir_base.

        Args:
          export_dir_base: the directory of exports.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: {path within the export's assets.extra: file to copy there}.
          as_text: whether to write text instead of binary protocol buffers.
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
            [spec], _ = self._build_towers(ModeKeys.PREDICT, lambda: (receiver.features, None), (HOST,))
            check_fits(spec, path)
            return saved_model.write(os.fspath(export_dir_base), receiver, spec, path, assets_extra or {}, as_text)

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint; None if there is none."""
        return checkpoint.latest(pathlib.Path(self.model_dir))

    def get_variable_names(self) -> list[str]:
        """Returns the names of the variables in the newest checkpoint.

        Raises:
          RunError: there is none.
        """
        return [name for name, _ in tf.train.list_variables(self._trained())]

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns a variable's value in the newest checkpoint.

        Raises:
          RunError: there is none.
        """
        return tf.train.load_variable(self._trained(), name)

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the directory of the events of `evaluate`."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def _build(self, input_fn, mode: str, devices: tuple[str, ...]):
        """Builds the towers' specs, their captured changes of variables, and their inputs, in the default graph."""
        v1.set_random_seed(self._config.tf_random_seed)
        v1.train.create_global_step()
        taken = {"mode": mode, "params": self.params, "config": self._config}
        inputs = Inputs(input_fn, taken, with_labels=mode != ModeKeys.PREDICT)
        return *self._build_towers(mode, inputs.next_batch, devices), inputs

    def _build_towers(self, mode: str, next_batch: Callable, devices: tuple[str, ...]):
        def call(features, labels):
            return model_fn.call_model_fn(self._model_fn, features, labels, mode, self.params, self._config)

        return model_towers.build_towers(call, next_batch, devices, self._config.tf_random_seed)

    def _trained(self) -> str:
        path = self.latest_checkpoint()
        if not path:
            raise errors.RunError(f"model_dir={self.model_dir} holds no checkpoint. Train first.")
        return path
