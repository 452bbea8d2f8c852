"""The sessions of an Estimator: training, and computing with a checkpoint."""

import copy

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.estimator.run_config import RunConfig
from tower_train.fronts.estimator.spec import EstimatorSpec
from tower_train.graph.devices import Devices
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1


def do_steps(
    spec: EstimatorSpec, train_op, loss: tf.Tensor, config: RunConfig, placed: Devices, newest: str | None, hooks: list,
    saving_listeners,
) -> int:  # fmt: skip
    """Trains in config.model_dir and saves there, until a hook or the end of the input stops it.

    Args:
      spec: the first tower's.
      train_op, loss: of a step.
      config, placed: how and where.
      newest: path of the checkpoint to begin at, or None.
      hooks: session hooks; those of the config and of the spec come after them, in the order of TensorFlow 1.15.
      saving_listeners: CheckpointSaverListeners, or None.

    Returns:
      The number of steps done.

    Raises:
      RunError: the checkpoint does not fit.
      ConfigError: listeners that would not be called.
    """
    saver = v1.train.Saver(
        max_to_keep=config.keep_checkpoint_max, keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        save_relative_paths=True, defer_build=True,
    )  # fmt: skip
    scaffold = v1.train.Scaffold(saver=saver, copy_from_scaffold=spec.scaffold)
    if newest:
        check_fits(spec, newest)
    if config.log_step_count_steps:
        values = {"loss": loss, "step": v1.train.get_global_step()}
        hooks = [*hooks, v1.train.LoggingTensorHook(values, every_n_iter=config.log_step_count_steps)]
    hooks, chief_hooks = [*hooks, *spec.training_hooks], list(spec.training_chief_hooks)
    if not any(isinstance(hook, v1.train.CheckpointSaverHook) for hook in hooks + chief_hooks):
        chief_hooks.append(
            v1.train.CheckpointSaverHook(
                config.model_dir, config.save_checkpoints_secs, config.save_checkpoints_steps, scaffold=scaffold,
                listeners=saving_listeners,
            )
        )  # fmt: skip
    elif saving_listeners:
        raise errors.ConfigError("saving_listeners would not be called: give them to your own CheckpointSaverHook.")
    done = 0
    with v1.train.MonitoredTrainingSession(
        checkpoint_dir=config.model_dir, scaffold=scaffold, hooks=hooks, chief_only_hooks=chief_hooks,
        save_checkpoint_secs=None, save_checkpoint_steps=None, save_summaries_steps=config.save_summary_steps,
        save_summaries_secs=None, config=_proto(placed, config), log_step_count_steps=config.log_step_count_steps,
    ) as session:  # fmt: skip
        while not session.should_stop():
            session.run([train_op, loss])
            done += 1
    return done


def open_on(
    path: str | None, spec: EstimatorSpec, config: RunConfig, placed: Devices, hooks
) -> v1.train.MonitoredSession:
    """A session on a checkpoint; on initial values where path is None.

    Raises:
      RunError: the checkpoint does not fit.
    """
    if path:
        check_fits(spec, path)
    else:
        v1.logging.warning("There is no checkpoint in %s; using initial values.", config.model_dir)
    creator = v1.train.ChiefSessionCreator(
        spec.scaffold, config=_proto(placed, config), checkpoint_filename_with_path=path
    )
    return v1.train.MonitoredSession(creator, hooks)


def check_fits(spec: EstimatorSpec, path: str) -> None:
    """Checks that a checkpoint holds the variables of the default graph.

    Raises:
      RunError: it does not.
    """
    if spec.scaffold and spec.scaffold.saver:
        return  # which variables it restores is the scaffold's affair
    variables = {variable.op.name: variable for variable in v1.global_variables()}
    found = list(checkpoint.differences(path, variables).values())
    if found:
        raise errors.RunError(
            f"{path} does not fit this model_fn: {'; '.join(found[:4])}{' ...' * (len(found) > 4)}. Give another "
            "model_dir, or the model_fn and params that it was trained with."
        )


def _proto(placed: Devices, config: RunConfig) -> v1.ConfigProto:
    proto = copy.deepcopy(placed.session_config)
    if config.session_config:
        proto.MergeFrom(config.session_config)
    return proto
