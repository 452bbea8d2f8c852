"""The sessions of an Estimator: training, and computing with a checkpoint."""

import contextlib
import copy
import functools

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator import eval_metrics
from tower_train.fronts.tf_estimator.model_towers import TrainStep
from tower_train.fronts.tf_estimator.run_config import RunConfig, WarmStartSettings
from tower_train.fronts.tf_estimator.spec import EstimatorSpec
from tower_train.fronts.tf_estimator.workers import Together
from tower_train.graph import devices
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1
_GLOBAL_STEP, _LOSS = "global_step", "loss"


class NonFiniteLossError(errors.NonFiniteError, v1.train.NanLossDuringTrainingError):
    """A loss or a gradient that is NaN or infinite, also by TensorFlow 1.15's name for it."""

    __str__ = Exception.__str__  # 1.15's contains only its name


@functools.cache
def _say_without_effect() -> None:
    console.notice(
        "RunConfig: session_config.gpu_options have no effect, as GPUs are the same for all of a process. Use "
        "tf.config.set_visible_devices and tf.config.set_logical_device_configuration at its start."
    )


class Sessions:
    """Opens sessions for the default graph.

    Args:
      config: of the Estimator.
      placed: the devices.
      warm_start: the initial values without a checkpoint, or None.
    """

    def __init__(self, config: RunConfig, placed: devices.Devices, warm_start: WarmStartSettings | None = None):
        self._config, self._warm_start = config, warm_start
        self._proto = copy.deepcopy(placed.session_config)
        if config.session_config:
            self._proto.MergeFrom(config.session_config)
            devices.use_gpus_alike(self._proto)
            if placed.num_workers > 1:  # a session sees this worker's devices only
                self._proto.device_filters[:] = placed.session_config.device_filters
            if config.session_config.HasField("gpu_options") and "gpu" in placed.towers[0]:
                _say_without_effect()

    def train(
        self, step: TrainStep, spec: EstimatorSpec, newest: str | None, hooks: list, saving_listeners,
        together: Together | None,
    ) -> int:  # fmt: skip
        """Trains in model_dir and saves there, until a hook or the end of the input stops it.

        Args:
          step: of all towers.
          spec: the first tower's.
          newest: path of the checkpoint to begin at, or None.
          hooks: session hooks; those of the config and of the spec come after them, in the order of TensorFlow 1.15.
          saving_listeners: CheckpointSaverListeners, or None.
          together: with the other workers, of which only the chief begins at the checkpoint, reports and saves; None
            for a process by itself.

        Returns:
          The number of steps done.

        Raises:
          RunError: the checkpoint does not fit.
          ConfigError: listeners that would not be called.
          NonFiniteError: a loss or a gradient is not finite.
        """
        config, is_chief = self._config, not together or together.is_chief
        if is_chief:
            self._begin_at(newest, spec)
        saver = spec.scaffold.saver or v1.train.Saver(
            max_to_keep=config.keep_checkpoint_max, keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            save_relative_paths=True, defer_build=True,
        )  # fmt: skip
        if not v1.get_collection(v1.GraphKeys.SAVERS):
            v1.add_to_collection(v1.GraphKeys.SAVERS, saver)  # the user's own CheckpointSaverHook looks there
        scaffold = v1.train.Scaffold(saver=saver, copy_from_scaffold=spec.scaffold)
        if config.log_step_count_steps:
            values = {_LOSS: step.loss, "step": v1.train.get_global_step()}
            hooks = [*hooks, v1.train.LoggingTensorHook(values, every_n_iter=config.log_step_count_steps)]
        hooks = [*hooks, *spec.training_hooks]
        if is_chief:
            savers = self._savers(spec, hooks, scaffold, saving_listeners)
            hooks = [*spec.training_chief_hooks, *savers, *self._reporters(scaffold), *hooks]
        else:
            hooks = [hook for hook in hooks if not isinstance(hook, v1.train.CheckpointSaverHook)]
        if together:
            scaffold, hooks = together.scaffold(scaffold), together.hooks(hooks)
        fetches, done = [step.op, step.loss, together.counting if together else []], 0
        try:
            with (
                together.running() if together else contextlib.nullcontext(),
                # Not one that reopens itself after an error: the other workers would not.
                v1.train.SingularMonitoredSession(
                    hooks, scaffold, together.target if together else "", self._proto,
                    checkpoint_dir=config.model_dir if is_chief else None,
                ) as session,
            ):  # fmt: skip
                while not session.should_stop():
                    session.run(fetches)
                    done += 1
        except errors.NonFiniteError as error:
            raise NonFiniteLossError(str(error)) from None
        return done

    def _reporters(self, scaffold: v1.train.Scaffold) -> list:
        """Returns the hooks that write steps/sec and summaries to model_dir."""
        config, found = self._config, []
        if config.log_step_count_steps:
            found.append(v1.train.StepCounterHook(config.log_step_count_steps, output_dir=config.model_dir))
        if config.save_summary_steps:
            found.append(v1.train.SummarySaverHook(
                config.save_summary_steps, output_dir=config.model_dir, scaffold=scaffold
            ))  # fmt: skip
        return found

    def _savers(self, spec: EstimatorSpec, hooks: list, scaffold: v1.train.Scaffold, saving_listeners) -> list:
        """Returns the hook that saves checkpoints; none if the user brings one or wants none."""
        config = self._config
        brings_one = any(
            isinstance(hook, v1.train.CheckpointSaverHook) for hook in (*hooks, *spec.training_chief_hooks)
        )
        if (config.save_checkpoints_secs or config.save_checkpoints_steps) and not brings_one:
            saver_hook = v1.train.CheckpointSaverHook(
                config.model_dir, config.save_checkpoints_secs or None, config.save_checkpoints_steps or None,
                scaffold=scaffold, listeners=saving_listeners, save_graph_def=config.checkpoint_save_graph_def,
            )  # fmt: skip
            return [saver_hook]
        if saving_listeners:
            raise errors.ConfigError(
                "saving_listeners (train_and_evaluate has one) would not be called: "
                + ("give them to your own CheckpointSaverHook." if brings_one else "no checkpoints are saved. Give "
                   "RunConfig save_checkpoints_steps or save_checkpoints_secs.")
            )  # fmt: skip
        return []

    def evaluate(self, path: str | None, spec: EstimatorSpec, hooks: list, steps: int | None, values=None) -> dict:
        """Evaluates batches until the input ends.

        Args:
          path: of a checkpoint; None for initial values.
          spec: its loss and its metrics.
          hooks: session hooks; those of the spec come after them.
          steps: the most batches; None for all.
          values: {variable: value} to evaluate, instead of a checkpoint's.

        Returns:
          {metric: its value over all batches}, including 'loss' and 'global_step'; empty if there was no batch.

        Raises:
          RunError: the checkpoint does not fit.
          GraphError: a metric has one of these two names.
        """
        eval_metrics.check_names(spec.eval_metric_ops)
        metrics = {**(spec.eval_metric_ops or {}), _LOSS: v1.metrics.mean(spec.loss)}
        update = tf.group([update for _, update in metrics.values()])
        results = {name: value for name, (value, _) in metrics.items()}
        final = v1.train.FinalOpsHook(results | {_GLOBAL_STEP: v1.train.get_global_step()})
        hooks, done = [*hooks, *spec.evaluation_hooks, final], 0
        with self.open(path, spec, hooks) if values is None else self._open_on(values, spec, hooks) as session:
            while not session.should_stop() and (steps is None or done < steps):
                session.run(update)
                done += 1
        return final.final_ops_values if done else {}

    def open(self, path: str | None, spec: EstimatorSpec, hooks: list) -> v1.train.MonitoredSession:
        """Opens a session on a checkpoint, which must fit (RunError), or on initial values if path is None."""
        self._begin_at(path, spec)
        if not path:
            values = f"those of {self._warm_start.ckpt_to_initialize_from}" if self._warm_start else "initial values"
            console.notice(f"There is no checkpoint in {self._config.model_dir}; using {values}.")
        creator = v1.train.ChiefSessionCreator(spec.scaffold, config=self._proto, checkpoint_filename_with_path=path)
        return v1.train.MonitoredSession(creator, hooks)

    def _open_on(self, values: dict, spec: EstimatorSpec, hooks: list) -> v1.train.MonitoredSession:
        """Opens a session on the values of variables; other variables have initial ones."""
        variables = [variable for variable in v1.global_variables() if variable.op.name in values]

        def assign(scaffold, session):
            for variable in variables:
                session.run(variable.initializer, {variable.initializer.inputs[1]: values[variable.op.name]})

        scaffold = v1.train.Scaffold(init_fn=assign, copy_from_scaffold=spec.scaffold)
        return v1.train.MonitoredSession(v1.train.ChiefSessionCreator(scaffold, config=self._proto), hooks)

    def open_for_export(self, path: str | None, spec: EstimatorSpec, saver: v1.train.Saver) -> v1.Session:
        """Opens a plain session on a checkpoint, which must fit (RunError), or on the values that training begins
        with."""
        self._begin_at(path, spec)
        session = v1.Session(config=self._proto)
        if path:
            saver.restore(session, path)
        else:
            session.run(v1.global_variables_initializer())
        session.run(local_init_op(spec.scaffold))
        return session

    def _begin_at(self, path: str | None, spec: EstimatorSpec) -> None:
        """Checks the checkpoint to begin at; without one, sets the initial values."""
        if path:
            check_fits(spec, path)
        elif self._warm_start:
            source = self._warm_start.ckpt_to_initialize_from
            try:
                tf.train.load_checkpoint(source)
            except (ValueError, tf.errors.OpError):
                raise errors.ConfigError(
                    f"warm_start_from={source}: there is no checkpoint. Give the path of one, or of a model_dir or an "
                    "export."
                ) from None
            v1.train.warm_start(*self._warm_start)


def local_init_op(scaffold: v1.train.Scaffold) -> tf.Operation:
    """Returns the op that initialises local variables and tables."""
    return scaffold.local_init_op or v1.train.Scaffold.default_local_init_op()


def check_fits(spec: EstimatorSpec, path: str) -> None:
    """Raises RunError if a checkpoint does not hold the variables of the default graph."""
    if spec.scaffold.saver:
        return  # the scaffold alone knows which variables it restores
    variables = {variable.op.name: variable for variable in v1.global_variables()}
    found = list(checkpoint.differences(path, variables).values())
    if found:
        raise errors.RunError(
            f"{path} does not fit this model_fn: {'; '.join(found[:4])}{' ...' * (len(found) > 4)}. Give another "
            "model_dir, or the model_fn and params that it was trained with."
        )
