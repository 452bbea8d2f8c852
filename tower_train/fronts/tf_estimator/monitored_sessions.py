"""The sessions of an Estimator: training, and computing with a checkpoint."""

import copy

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator.model_towers import TrainStep
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec
from tower_train.graph.devices import Devices
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1
_GLOBAL_STEP, _LOSS = "global_step", "loss"


class Sessions:
    """Opens sessions for the default graph.

    Args:
      config: of the Estimator.
      placed: the devices.
    """

    def __init__(self, config: RunConfig, placed: Devices):
        self._config = config
        self._proto = copy.deepcopy(placed.session_config)
        if config.session_config:
            self._proto.MergeFrom(config.session_config)

    def train(self, step: TrainStep, spec: EstimatorSpec, newest: str | None, hooks: list, saving_listeners) -> int:
        """Trains in model_dir and saves there, until a hook or the end of the input stops it.

        Args:
          step: of all towers.
          spec: the first tower's.
          newest: path of the checkpoint to begin at, or None.
          hooks: session hooks; those of the config and of the spec come after them, in the order of TensorFlow 1.15.
          saving_listeners: CheckpointSaverListeners, or None.

        Returns:
          The number of steps done.

        Raises:
          RunError: the checkpoint does not fit.
          ConfigError: listeners that would not be called.
        """
        config = self._config
        if newest:
            check_fits(spec, newest)
        saver = v1.train.Saver(
            max_to_keep=config.keep_checkpoint_max, keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            save_relative_paths=True, defer_build=True,
        )  # fmt: skip
        scaffold = v1.train.Scaffold(saver=saver, copy_from_scaffold=spec.scaffold)
        if config.log_step_count_steps:
            values = {_LOSS: step.loss, "step": v1.train.get_global_step()}
            hooks = [*hooks, v1.train.LoggingTensorHook(values, every_n_iter=config.log_step_count_steps)]
        hooks = [*hooks, *spec.training_hooks]
        chief_hooks = [*spec.training_chief_hooks, *self._savers(spec, hooks, scaffold, saving_listeners)]
        done = 0
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=config.model_dir, scaffold=scaffold, hooks=hooks, chief_only_hooks=chief_hooks,
            save_checkpoint_secs=None, save_checkpoint_steps=None, save_summaries_steps=config.save_summary_steps,
            save_summaries_secs=None, config=self._proto, log_step_count_steps=config.log_step_count_steps,
        ) as session:  # fmt: skip
            while not session.should_stop():
                session.run([step.op, step.loss])
                done += 1
        return done

    def _savers(self, spec: EstimatorSpec, hooks: list, scaffold: v1.train.Scaffold, saving_listeners) -> list:
        """Returns the hook that saves checkpoints; none if the user brings one."""
        config = self._config
        if not any(isinstance(hook, v1.train.CheckpointSaverHook) for hook in (*hooks, *spec.training_chief_hooks)):
            saver_hook = v1.train.CheckpointSaverHook(
                config.model_dir, config.save_checkpoints_secs, config.save_checkpoints_steps, scaffold=scaffold,
                listeners=saving_listeners,
            )  # fmt: skip
            return [saver_hook]
        if saving_listeners:
            raise errors.ConfigError("saving_listeners would not be called: give them to your own CheckpointSaverHook.")
        return []

    def evaluate(self, path: str | None, spec: EstimatorSpec, hooks: list, steps: int | None) -> dict:
        """Evaluates batches until the input ends.

        Args:
          path: of a checkpoint; None for initial values.
          spec: its loss and its metrics.
          hooks: session hooks; those of the spec come after them.
          steps: the most batches; None for all.

        Returns:
          {metric: its value over all batches}, among them 'loss' and 'global_step'; empty if there was no batch.

        Raises:
          RunError: the checkpoint does not fit.
        """
        metrics = {**(spec.eval_metric_ops or {}), _LOSS: v1.metrics.mean(spec.loss)}
        update = tf.group([update for _, update in metrics.values()])
        values = {name: value for name, (value, _) in metrics.items()}
        final = v1.train.FinalOpsHook(values | {_GLOBAL_STEP: v1.train.get_global_step()})
        done = 0
        with self.open(path, spec, [*hooks, *spec.evaluation_hooks, final]) as session:
            while not session.should_stop() and done != steps:
                session.run(update)
                done += 1
        return final.final_ops_values if done else {}

    def open(self, path: str | None, spec: EstimatorSpec, hooks: list) -> v1.train.MonitoredSession:
        """Opens a session on a checkpoint; on initial values if path is None.

        Raises:
          RunError: the checkpoint does not fit.
        """
        if path:
            check_fits(spec, path)
        else:
            console.notice(f"There is no checkpoint in {self._config.model_dir}; using initial values.")
        creator = v1.train.ChiefSessionCreator(spec.scaffold, config=self._proto, checkpoint_filename_with_path=path)
        return v1.train.MonitoredSession(creator, hooks)


def check_fits(spec: EstimatorSpec, path: str) -> None:
    """Checks that a checkpoint holds the variables of the default graph.

    Raises:
      RunError: it does not.
    """
    if spec.scaffold and spec.scaffold.saver:
        return  # the scaffold alone knows which variables it restores
    variables = {variable.op.name: variable for variable in v1.global_variables()}
    found = list(checkpoint.differences(path, variables).values())
    if found:
        raise errors.RunError(
            f"{path} does not fit this model_fn: {'; '.join(found[:4])}{' ...' * (len(found) > 4)}. Give another "
            "model_dir, or the model_fn and params that it was trained with."
        )
