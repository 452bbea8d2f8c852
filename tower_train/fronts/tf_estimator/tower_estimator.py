"""The Estimator: trains a model_fn on N towers, evaluates it and predicts."""

import copy
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster.membership import Membership
from tower_train.fronts import placement
from tower_train.fronts.tf_estimator import (
    arguments,
    eval_events,
    model_towers,
    predictions,
    saved_model,
    task,
    workers,
)
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
        tf.Variable or Keras layers are made once, and are assigned to once a step: what Keras layers assign is the mean
        over towers, other assignments are the first tower's. The gradients that it gives to a tf.compat.v1.train
        optimizer are averaged and applied once.
      model_dir: the directory of checkpoints and events; None takes the config's, or a new temporary one.
      config: a RunConfig.
      params: passed on to model_fn and input_fn.
      warm_start_from: path of a checkpoint, of a model_dir or of an export, or WarmStartSettings: the initial values of
        variables if model_dir has no checkpoint.

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
        """The initial values."""
        return self._warm_start

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None) -> "Estimator":
        """Trains, from the newest checkpoint in model_dir if there is one.

        Under a TF_CONFIG of several workers each calls this, trains on its own input_fn's batches, and ends after the
        same step: the last for which all have batches, or after which a hook asked for the end. Only the chief reads
        and writes model_dir; all begin with its values.

        Args:
          input_fn: returns a tf.data.Dataset of batches (features, labels). Each tower takes the next one: a step
            consumes as many batches as there are towers. Last batches that do not suffice for all are left out. Its
            argument input_context, if any, is a tf.distribute.InputContext, for
            dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).
          hooks: session hooks, of every worker; a CheckpointSaverHook of the chief only.
          steps: number of steps to do; None goes on until the input ends.
          max_steps: the global step to stop at, which may have been reached already; instead of steps.
          saving_listeners: tf.compat.v1.train.CheckpointSaverListeners, of the chief.

        Returns:
          self.

        Raises:
          UserError: wrong arguments, input or model; the message gives the remedy.
          WorkerError: another worker is missing.
        """
        arguments.check_steps(steps, max_steps)
        arguments.check_input_fn(input_fn)
        hooks, listeners = arguments.checked_hooks(hooks), arguments.checked_listeners(saving_listeners)
        with workers.join(self.config, self._placed(self.config.towers)) as member:
            newest = self.latest_checkpoint() if member.task.is_chief else None
            first = step_of(newest) if newest else 0
            last = first + steps if steps else max_steps
            if last is not None and first >= last:
                console.notice(f"Nothing to train: {newest} is at or after max_steps={max_steps}.")
                if member.task.is_alone:
                    return self
            with self._model.graph():
                self._train(member, input_fn, newest, (first, last), hooks, listeners)
        return self

    def _train(self, member: Membership, input_fn, newest: str | None, steps: tuple, hooks, listeners) -> None:
        """Trains in the default graph, from the first of the steps to the last, which may be None."""
        built = self._model.build(ModeKeys.TRAIN, input_fn, member.devices)
        step = model_towers.train_step(built.specs, built.captures, built.all_reduce)
        v1.summary.scalar("loss", step.loss)
        guard = nonfinite.NonFiniteGuard(step) if step.report else v1.train.NanTensorHook(step.loss)
        together = None if member.task.is_alone else workers.Together(member, self.config, built, step)
        first, last = together.agree(*steps) if together else steps
        if last is None or first < last:
            ends = [v1.train.StopAtStepHook(last_step=last)] if last is not None else []
            sessions = Sessions(self.config, member.devices, self._warm_start)
            hooks = [built.inputs.hook, *hooks, *ends, guard]
            if not sessions.train(step, built.specs[0], newest, hooks, listeners, together):
                towers = len(built.specs)
                raise errors.DataError(
                    f"input_fn yielded too little to train on: a step takes {towers} batch{'es' * (towers > 1)}, one a "
                    f"tower{' of each worker' * bool(together)}. Look at its files and filters, or repeat() the data "
                    "set."
                )
        member.leave(None)

    def evaluate(self, input_fn, steps=None, hooks=None, checkpoint_path=None, name=None) -> dict:
        """Evaluates a checkpoint, on one device.

        Args:
          input_fn: as for train.
          steps: number of batches to evaluate; None: all.
          hooks: session hooks.
          checkpoint_path: the checkpoint; None: the newest.
          name: of this evaluation, if there are several; its events go to model_dir/eval_NAME.

        Returns:
          {metric: its value over all batches}, including 'loss', the mean over batches, and 'global_step'.

        Raises:
          UserError: as for train.
        """
        return self._evaluate(input_fn, steps, hooks, checkpoint_path or self._newest(), name)

    def evaluate_values(self, values: dict, input_fn, steps=None, hooks=None, name=None) -> dict:
        """Evaluates values of variables, {name: value}, instead of a checkpoint; otherwise like `evaluate`."""
        return self._evaluate(input_fn, steps, hooks, None, name, values)

    def _evaluate(self, input_fn, steps, hooks, path: str | None, name: str | None, values=None) -> dict:
        arguments.check_steps(steps)
        arguments.check_input_fn(input_fn)
        hooks, placed = arguments.checked_hooks(hooks), self._placed(1)
        with self._model.graph():
            built = self._model.build(ModeKeys.EVAL, input_fn, placed)
            sessions = Sessions(self.config, placed, self._warm_start)
            found = sessions.evaluate(path, *built.specs, [built.inputs.hook, *hooks], steps, values)
        if not found:
            raise errors.DataError("input_fn yielded no batch to evaluate. Look at its files and filters.")
        if self.config.is_chief or self.config.task_type == task.EVALUATOR:
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
        hooks, path, placed = arguments.checked_hooks(hooks), checkpoint_path or self._newest(), self._placed(1)
        with self._model.graph():
            [spec], _, _, inputs = self._model.build(ModeKeys.PREDICT, input_fn, placed)
            if inputs.are_endless:
                console.notice(
                    "input_fn returned tensors, of which predictions never end. Take as many as you need, or return a "
                    "tf.data.Dataset."
                )
            fetched = predictions.chosen(spec.predictions, predict_keys)
            sessions = Sessions(self.config, placed, self._warm_start)
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
        sessions = Sessions(self.config, self._placed(1), self._warm_start)
        return saved_model.write(base, self._model, sessions, receivers, path, form)

    def _placed(self, towers) -> Devices:
        return placement.place(towers, "num_gpus", in_session=True)

    def _newest(self) -> str | None:
        """Returns the newest checkpoint, or None; RunError if only the chief could have it."""
        path = self.latest_checkpoint()
        if not path and not self.config.is_chief:
            raise errors.RunError(
                f"model_dir={self.model_dir} holds no checkpoint, which the chief writes. Do this in the chief only "
                "(if estimator.config.is_chief), or give all tasks one model_dir that they share."
            )
        return path

    def _start(self) -> str | None:
        """Returns the checkpoint from which training would start, None for given values; RunError for initial values,
        which are not worth an export."""
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
            return listed  # the user's own saver names them differently
        return checkpoint.latest(pathlib.Path(self.model_dir))

    def get_variable_names(self) -> list[str]:
        """Returns the names of the variables in the newest checkpoint; RunError if there is none."""
        return [name for name, _ in tf.train.list_variables(self._trained())]

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns a variable's value in the newest checkpoint; RunError if there is none, or no such variable in it."""
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


def step_of(path: str) -> int:
    """Returns the step of a checkpoint; 0 if its path does not tell."""
    reader = tf.train.load_checkpoint(path)
    return int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else 0
