"""Checkpoints: TensorFlow's own, in a train_dir, and restoring them."""

import os
import pathlib

import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1
PREFIX = "model.ckpt"


def latest(train_dir: pathlib.Path) -> str | None:
    """The newest checkpoint's path, or None."""
    return tf.train.latest_checkpoint(str(train_dir))


def step_of(path: str) -> int:
    """The step a checkpoint was saved at, from its name.

    Raises:
      RunError: the name carries no step.
    """
    step = path.rpartition("-")[2]
    if not step.isdigit():
        raise errors.RunError(f"checkpoint {path}: its name must end in -STEP, as in {PREFIX}-1000.")
    return int(step)


class Checkpoints:
    """Saves the variables of one graph into a train_dir, keeping the newest ones.

    Create it before the graph is finalised.
    """

    def __init__(self, train_dir: pathlib.Path, variables: list[tf.Variable], keep: int):
        """Args: train_dir; what to save; how many checkpoints to keep, 0 for all."""
        self._prefix = str(train_dir / PREFIX)
        self._variables = {variable.op.name: variable for variable in variables}
        self._saver = v1.train.Saver(self._variables, max_to_keep=keep, save_relative_paths=True)
        state = tf.train.get_checkpoint_state(str(train_dir))
        if state:
            there = [path for path in state.all_model_checkpoint_paths if tf.io.gfile.exists(path + ".index")]
            self._saver.set_last_checkpoints_with_time([(path, os.path.getmtime(path + ".index")) for path in there])
        self._restorers = {}

    def save(self, session: v1.Session, step: int) -> str:
        """Writes one checkpoint and returns its path."""
        return self._saver.save(session, self._prefix, global_step=step, write_meta_graph=False)

    def plan_restore(self, path: str, override: bool) -> list[str]:
        """Compares a checkpoint with the graph and makes ready to restore it.

        Args:
          path: a checkpoint.
          override: initialise afresh what the checkpoint lacks, in place of an error.

        Returns:
          Names of the variables that are initialised afresh.

        Raises:
          RunError: the checkpoint cannot be read, or lacks variables, or has them in another shape or type; with
            override only where it holds nothing of this network.
        """
        saved = _variables_in(path)
        wanted = {
            name: (variable.dtype.base_dtype, variable.shape.as_list()) for name, variable in self._variables.items()
        }
        matching = [name for name in wanted if saved.get(name) == wanted[name]]
        others = [name for name in wanted if name not in matching]
        nothing_trained = not any(wanted[name][0].is_floating for name in matching)
        if others and (nothing_trained or not override):
            shown = "; ".join(
                f"{name}: graph {_about(wanted[name])}, checkpoint {_about(saved.get(name))}" for name in others[:4]
            )
            way_out = "." if nothing_trained else ", or --override to initialise these variables afresh."
            raise errors.RunError(
                f"{path} does not fit this network: {shown}{' ...' if len(others) > 4 else ''}. "
                f"Give another --train_dir{way_out}"
            )
        self._restorers[path] = v1.train.Saver({name: self._variables[name] for name in matching})
        return others

    def restore(self, session: v1.Session, path: str) -> None:
        """Restores what plan_restore found in the checkpoint."""
        self._restorers[path].restore(session, path)


def _variables_in(path: str) -> dict[str, tuple]:
    try:
        reader = tf.train.load_checkpoint(path)
    except (tf.errors.OpError, ValueError) as error:
        raise errors.RunError(f"checkpoint {path} cannot be read: {str(error).splitlines()[0]}.") from None
    dtypes = reader.get_variable_to_dtype_map()
    return {name: (dtypes[name], list(shape)) for name, shape in reader.get_variable_to_shape_map().items()}


def _about(variable: tuple | None) -> str:
    return f"{variable[0].name}{variable[1]}" if variable else "none"
