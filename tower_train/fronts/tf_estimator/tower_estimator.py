"""The Estimator: a model_fn, trained on N towers, evaluated and asked for predictions."""

import copy
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import placement
from tower_train.fronts.tf_estimator import arguments, eval_events, model_towers, predictions, saved_model, task
from tower_train.fronts.tf_estimator.model import Model
from tower_train.fronts.tf_estimator.model_fn import check_model_fn
from tower_train.fronts.tf_estimator.monitored_sessions import Sessions
from tower_train.fronts.tf_estimator.run_config import RunConfig, WarmStartSettings, warm_start_settings
from tower_train.fronts.tf_estimator.spec import ModeKeys
from tower_train.graph.devices import Devices
from tower_train.run import nonfinite
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1


class Estimator:
    """Trains and evaluates a model that is written as a function.

    Names, arguments and meanings are those of TensorFlow 1.15's tf.estimator.Estimator.

    Args:
      model_fn: (features, labels, mode, params, config) -> EstimatorSpec, with any of these arguments in any order:
        they are passed by name. To train it is called once a tower. Variables that it makes with get_variable,
        tf.Variable or Keras layers are made once, and are assigned to once a step, by the first tower; the gradients
        that it gives to a tf.compat.v1.train optimizer are averaged and applied once.
      model_dir: the directory of checkpoints and events; None takes the config's, or a new temporary one.
      config: a RunConfig.
      params: passed on to model_fn and input_fn.
      warm_start_from: path of a checkpoint, of a model_dir or of an export, or WarmStartSettings: the values that
        variables begin with if model_dir has no checkpoint.

    Raises:
      ConfigError: arguments that are of another kind, or contradict each other.
    """

    def __init__(self, model_fn: Callable, model_dir=None, config=None, params=None, warm_start_from=None):
        check_model_fn(model_fn, params)
        config = arguments.config_with_model_dir(config, model_dir)
        self._model = Model(model_fn, copy.deepcopy(params or {}), config)
        self._warm_start = warm_start_settings(warm_start_from)

    @property
    def model_dir(self) -> str:
        return self.config.model_dir

    @property
    def config(self) -> RunConfig:
        return self._model.config

    # What subclasses of TensorFlow 1.15's Estimator read.
    _model_dir = property(lambda self: self.model_dir)
    _config = property(lambda self: self.config)
    _session_config = property(lambda self: self.config.session_config)
    _params = property(lambda self: self.params)

    @property
    def params(self) -> dict:
        """A copy."""
        return copy.deepcopy(self._model.params)

    @property
    def model_fn(self) -> Callable:
        """The model_fn as a function (features, labels, mode, config) -> EstimatorSpec, with the params bound."""

        def model_fn(features, labels, mode, config):
            return self._model._replace(config=config).call(features, labels, mode)

        return model_fn

    @property
    def warm_start_from(self) -> WarmStartSettings | None:
        """The values to begin with."""
        return self._warm_start

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
        arguments.check_input_fn(input_fn)
        config, listeners = self.config, arguments.checked_listeners(saving_listeners)
        task.check_is_alone(config)
        hooks, newest = arguments.checked_hooks(hooks), self.latest_checkpoint()
        if max_steps is not None and newest and _step_of(newest) >= max_steps:
            console.notice(f"Nothing to train: {newest} is at or after max_steps={max_steps}.")
            return self
        if steps or max_steps:
            hooks.append(v1.train.StopAtStepHook(steps, max_steps))
        placed, sessions = self._placed(config.towers)
        with self._model.graph():
            specs, captures, inputs = self._model.build(ModeKeys.TRAIN, input_fn, placed.towers)
            step = model_towers.train_step(specs, captures)
            v1.summary.scalar("loss", step.loss)
            guard = nonfinite.NonFiniteGuard(step) if step.report else v1.train.NanTensorHook(step.loss)
            done = sessions.train(step, specs[0], newest, [inputs.hook, *hooks, guard], listeners)
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
        path = checkpoint_path or self.latest_checkpoint()
        return self._evaluate(input_fn, steps, hooks, path, name)

    def evaluate_values(self, values: dict, input_fn, steps=None, hooks=None, name=None) -> dict:
        """Evaluates values of variables, {name: value}, instead of a checkpoint; otherwise like `evaluate`."""
        return self._evaluate(input_fn, steps, hooks, None, name, values)

    def _evaluate(self, input_fn, steps, hooks, path: str | None, name: str | None, values=None) -> dict:
        arguments.check_steps(steps)
        arguments.check_input_fn(input_fn)
        hooks, (placed, sessions) = arguments.checked_hooks(hooks), self._placed(1)
        with self._model.graph():
            [spec], _, inputs = self._model.build(ModeKeys.EVAL, input_fn, placed.towers)
            found = sessions.evaluate(path, spec, [inputs.hook, *hooks], steps, values)
        if not found:
            raise errors.DataError("input_fn yielded no batch to evaluate. Look at its files and filters.")
        eval_events.write(self.eval_dir(name), found, path)
        return found

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
        arguments.check_input_fn(input_fn)
        hooks, path = arguments.checked_hooks(hooks), checkpoint_path or self.latest_checkpoint()
        placed, sessions = self._placed(1)
        with self._model.graph():
            [spec], _, inputs = self._model.build(ModeKeys.PREDICT, input_fn, placed.towers)
            if inputs.are_endless:
                console.notice(
                    "input_fn returned tensors, of which predictions never end. Take as many as you need, or return a "
                    "tf.data.Dataset."
                )
            fetched = predictions.chosen(spec.predictions, predict_keys)
            session = sessions.open(path, spec, [inputs.hook, *hooks, *spec.prediction_hooks])
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
        self, export_dir_base, serving_input_receiver_fn, assets_extra=None, as_text=False, checkpoint_path=None,
        experimental_mode=ModeKeys.PREDICT,
    ) -> bytes:  # fmt: skip
        """Writes a SavedModel of a checkpoint into a new directory, named by the time, under export_dir_base.

        Args:
          export_dir_base: the directory of exports.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: {path within the export's assets.extra: file to copy there}.
          as_text: whether to write text instead of binary protocol buffers.
          checkpoint_path: the checkpoint; None: the newest, else what training would start from.
          experimental_mode: the mode of the graph; for TRAIN and EVAL the function returns a SupervisedInputReceiver.

        Returns:
          The path of the new directory.

        Raises:
          RunError: there is no checkpoint.
        """
        receivers = {experimental_mode: serving_input_receiver_fn}
        return self.experimental_export_all_saved_models(
            export_dir_base, receivers, assets_extra, as_text, checkpoint_path
        )

    def export_savedmodel(
        self, export_dir_base, serving_input_receiver_fn, assets_extra=None, as_text=False, checkpoint_path=None,
        strip_default_attrs=False,
    ) -> bytes:  # fmt: skip
        """Like `export_saved_model`, by its older name; keeps ops' default attributes unless strip_default_attrs."""
        receivers = {ModeKeys.PREDICT: serving_input_receiver_fn}
        form = saved_model.Form(assets_extra or {}, as_text, strip_default_attrs)
        return self._export(export_dir_base, receivers, checkpoint_path, form)

    def experimental_export_all_saved_models(
        self, export_dir_base, input_receiver_fn_map, assets_extra=None, as_text=False, checkpoint_path=None
    ) -> bytes:
        """Writes a SavedModel with a graph for each mode; like `export_saved_model`.

        Args:
          input_receiver_fn_map: {mode: function that returns the graph's inputs}.
          others: as for export_saved_model.
        """
        form = saved_model.Form(assets_extra or {}, as_text)
        return self._export(export_dir_base, input_receiver_fn_map, checkpoint_path, form)

    def _export(self, base, receivers: dict, path: str | None, form: saved_model.Form) -> bytes:
        base, path = os.fsdecode(base), path or self.latest_checkpoint() or self._start()
        arguments.check_directory(base, "export_dir_base")
        return saved_model.write(base, self._model, self._placed(1)[1], receivers, path, form)

    def _placed(self, towers) -> tuple[Devices, Sessions]:
        """Returns the devices of towers, and sessions on them."""
        placed = placement.place(towers, "num_gpus", in_session=True)
        return placed, Sessions(self.config, placed, self._warm_start)

    def _start(self) -> str | None:
        """Returns the checkpoint that training would start from; None if it would start from values.

        Raises:
          RunError: it would start from initial values, which are not worth an export.
        """
        if getattr(self._model.model_fn, "has_values", False):
            return None
        if not self._warm_start:
            return self._trained()
        path, *others = self._warm_start
        if others != list(WarmStartSettings(path)[1:]):
            return None
        return (os.path.isdir(path) and tf.train.latest_checkpoint(path)) or path

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint; None if there is none."""
        listed = tf.train.latest_checkpoint(self.model_dir)
        if listed and not os.path.basename(listed).startswith(f"{checkpoint.PREFIX}-"):
            return listed  # a saver of the user's own names them in another way
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
          RunError: there is none, or no such variable in it.
        """
        reader = tf.train.load_checkpoint(path := self._trained())
        if not reader.has_tensor(name):
            raise errors.RunError(f"{path} has no variable {name!r}; get_variable_names() lists those it has.")
        return reader.get_tensor(name)

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the directory of the events of `evaluate`."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def _trained(self) -> str:
        path = self.latest_checkpoint()
        if not path:
            raise errors.RunError(f"model_dir={self.model_dir} holds no checkpoint. Train first.")
        return path


def _step_of(path: str) -> int:
    """The step that a checkpoint was saved at; 0 if it does not tell."""
    reader = tf.train.load_checkpoint(path)
    return int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else 0
