"""Checkpoints: TensorFlow's own, in a train_dir, and restoring them."""

import os
import pathlib
import re
import uuid

import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1
PREFIX = "model.ckpt"
STATE = "checkpoint"  # where TensorFlow lists them
_INDEX = re.compile(rf"({re.escape(PREFIX)}-\d+)\.index")


def latest(train_dir: pathlib.Path) -> str | None:
    """The path of the newest checkpoint whose files are there; None where none was saved.

    Raises:
      RunError: checkpoints were saved, but none is there any more.
    """
    there = existing(train_dir) or existing(train_dir)  # its trainer may replace the only one during the first look
    if not there and (train_dir / STATE).exists():
        raise errors.RunError(
            f"{train_dir / STATE} lists checkpoints of which none is there. Put them back, or remove that file to "
            "start at step 0."
        )
    return there[-1] if there else None


def existing(train_dir: pathlib.Path) -> list[str]:
    """Paths of the checkpoints whose files are there, oldest first, whether or not TensorFlow lists them.

    TensorFlow renames the index into place last of all, so that what has one is complete.
    """
    try:
        names = [found[1] for found in map(_INDEX.fullmatch, os.listdir(train_dir)) if found]
    except FileNotFoundError:
        return []
    return [str(train_dir / name) for name in sorted(names, key=step_of)]


def listed_names(train_dir: pathlib.Path) -> list[str]:
    """The names of the checkpoints that TensorFlow lists, oldest first; none where its list is missing or damaged."""
    try:
        state = tf.train.get_checkpoint_state(str(train_dir))
    except ValueError:  # bytes that are no text
        return []
    return [os.path.basename(path) for path in state.all_model_checkpoint_paths] if state else []


def write_list(train_dir: pathlib.Path, paths: list[str]) -> None:
    """Makes these checkpoints, oldest first, the ones that TensorFlow lists, by names that stay right in another place.

    Leaves a list alone that says so already.
    """
    names = [os.path.basename(path) for path in paths]
    if names != listed_names(train_dir):
        # Not train.update_checkpoint_state, which prints three lines about its own deprecation.
        state = v1.train.generate_checkpoint_state_proto(os.path.abspath(train_dir), names[-1], names)
        temporary = train_dir / f"{STATE}.tmp{uuid.uuid4().hex}"
        temporary.write_text(str(state))
        os.replace(temporary, train_dir / STATE)


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
        self._train_dir = train_dir
        self._variables = {variable.op.name: variable for variable in variables}
        self._saver = v1.train.Saver(self._variables)
        self._keep = keep
        self._restorers, self._fresh = {}, {}

    def save(self, session: v1.Session, step: int) -> str:
        """Writes one checkpoint, and only then removes those that are too old; returns its path.

        Raises:
          OpError, OSError: it could not be written; those from before are all there.
        """
        path = str(self._train_dir / f"{PREFIX}-{step}")
        # Without Saver.save's own bookkeeping, which drops a checkpoint from its list before the new one is written.
        definition = self._saver.saver_def
        session.run(definition.save_tensor_name, {definition.filename_tensor_name: path})
        there = existing(self._train_dir)
        kept = there[-self._keep :]
        write_list(self._train_dir, kept)
        for old in there[: -len(kept)]:
            name = os.path.basename(old)
            # The index goes first, so that what is removed by half is no checkpoint any more.
            files = [file for file in os.listdir(self._train_dir) if is_file_of(file, name)]
            for file in sorted(files, reverse=True):
                os.remove(self._train_dir / file)
        return path

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
        others = differences(path, self._variables)
        matching = {name: variable for name, variable in self._variables.items() if name not in others}
        nothing_trained = not any(variable.dtype.base_dtype.is_floating for variable in matching.values())
        if others and (nothing_trained or not override):
            shown = "; ".join(list(others.values())[:4])
            way_out = "." if nothing_trained else ", or --override to initialise these variables afresh."
            raise errors.RunError(
                f"{path} does not fit this network: {shown}{' ...' if len(others) > 4 else ''}. "
                f"Give another --train_dir{way_out}"
            )
        self._restorers[path] = v1.train.Saver(matching)
        self._fresh[path] = [self._variables[name].initializer for name in others]
        return list(others)

    def restore(self, session: v1.Session, path: str) -> None:
        """Restores what plan_restore found in the checkpoint, and initialises the rest.

        Raises:
          RunError: its files are damaged.
        """
        restore(self._restorers[path], session, path)
        session.run(self._fresh[path])


def differences(path: str, variables: dict[str, tf.Variable]) -> dict[str, str]:
    """{name: what a checkpoint and a graph hold by it}, where the checkpoint lacks the variable or has it in another
    shape or type.

    Raises:
      RunError: the checkpoint cannot be read.
    """
    saved = _variables_in(path)
    wanted = {name: (variable.dtype.base_dtype, variable.shape.as_list()) for name, variable in variables.items()}
    return {
        name: f"{name}: graph {_about(about)}, checkpoint {_about(saved.get(name))}"
        for name, about in wanted.items()
        if saved.get(name) != about
    }


def restore(saver: v1.train.Saver, session: v1.Session, path: str) -> None:
    """Restores a saver's variables.

    Raises:
      RunError: the checkpoint's files are damaged, or do not hold these variables.
    """
    try:
        # What saver.restore does, but for the page of explanations that it puts around errors.
        session.run(saver.saver_def.restore_op_name, {saver.saver_def.filename_tensor_name: path})
    except tf.errors.OpError as error:
        raise errors.RunError(
            f"checkpoint {path} cannot be restored: {reason(error)}. Put its files back as they were, or move them "
            "away so that the one before is used."
        ) from None


def reason(error: Exception) -> str:
    """The one line of an exception that says why, without the graph that TensorFlow puts around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(getattr(error, "message", error)).removeprefix("Graph execution error:")
    lines = [line for line in text.splitlines() if line.strip()]
    node = next((i for i, line in enumerate(lines) if line.startswith("Node: ")), -1)  # the reason comes next
    return (lines[node + 1 :] or lines or [type(error).__name__])[0].strip().rstrip(".")


def is_file_of(file: str, name: str) -> bool:
    """Whether a file belongs to the checkpoint of a name, both without their directory."""
    return re.fullmatch(rf"{re.escape(name)}\.(index|data-\d{{5}}-of-\d{{5}})", file) is not None


def _variables_in(path: str) -> dict[str, tuple]:
    try:
        reader = tf.train.load_checkpoint(path)
    except (tf.errors.OpError, ValueError) as error:
        raise errors.RunError(f"checkpoint {path} cannot be read: {reason(error)}.") from None
    dtypes = reader.get_variable_to_dtype_map()
    return {name: (dtypes[name], list(shape)) for name, shape in reader.get_variable_to_shape_map().items()}


def _about(variable: tuple | None) -> str:
    return f"{variable[0].name}{variable[1]}" if variable else "none"
