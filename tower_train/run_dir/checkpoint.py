"""Checkpoints in TensorFlow's own format: finding, saving, comparing, restoring and repairing them."""

import contextlib
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.run_dir import json_files

v1 = tf.compat.v1
PREFIX = "model.ckpt"
_STATE = "checkpoint"  # the file in which TensorFlow lists them
_FILE = re.compile(rf"({re.escape(PREFIX)}-[0-9]{{1,18}})\.(index|data-[0-9]{{5}}-of-[0-9]{{5}})")
# Files of an interrupted write: of TensorFlow's checkpoint and its list, and of our JSON files.
_TEMPORARY = re.compile(
    rf"{_FILE.pattern}\.tempstate[0-9]+|{_STATE}\.tmp[0-9a-f]{{32}}"
    r"|\.(run\.json|result\.json|metrics\.jsonl|best\.json)\.\d+"
)


def latest(train_dir: pathlib.Path) -> str | None:
    """Returns the path of the newest complete checkpoint; None if none was saved. Raises RunError if checkpoints were
    saved, but all are gone, or another kind of file is in the place of one."""
    check_files(train_dir)
    paths = existing(train_dir) or existing(train_dir)  # the trainer may replace the only one meanwhile
    if not paths and (train_dir / _STATE).exists():
        raise errors.RunError(
            f"{train_dir / _STATE} lists checkpoints of which none is there. Put them back, or remove that file to "
            "start at step 0."
        )
    return paths[-1] if paths else None


def existing(train_dir: pathlib.Path) -> list[str]:
    """Returns the paths of complete checkpoints, oldest first, whether or not TensorFlow lists them.

    TensorFlow renames the index into place last, so a checkpoint with an index is complete.
    """
    names = [file[1] for file in _files(train_dir) if file[2] == "index"]
    return [str(train_dir / name) for name in sorted(names, key=step_of)]


def _files(folder: pathlib.Path) -> list[re.Match]:
    """Returns (checkpoint's name, suffix) of each file of a checkpoint in a folder, which need not exist."""
    return list(filter(None, map(_FILE.fullmatch, os.listdir(folder)))) if folder.is_dir() else []


def check_files(folder: pathlib.Path) -> None:
    """Raises RunError for a FIFO, a directory or a device in the place of a checkpoint's file."""
    for name in (_STATE, *(file[0] for file in _files(folder))):
        json_files.refuse_others(folder / name)


def files_of(path: str | os.PathLike) -> list[pathlib.Path]:
    """Returns a checkpoint's files, its index first: without it the rest is no checkpoint.

    Remove or rename them in this order, and make them in the reverse, so that an interruption leaves no half.
    """
    folder, name = pathlib.Path(path).parent, pathlib.Path(path).name
    return [folder / file for file in sorted((file[0] for file in _files(folder) if file[1] == name), reverse=True)]


def _write_list(train_dir: pathlib.Path, paths: list[str]) -> None:
    """Lists these checkpoints, oldest first, in TensorFlow's file, by names that survive a move of the folder.

    Does not touch a list that is right already.
    """
    names, target = [os.path.basename(path) for path in paths], train_dir / _STATE
    # Not train.update_checkpoint_state, which prints three lines about its own deprecation.
    content = str(v1.train.generate_checkpoint_state_proto(os.path.abspath(train_dir), names[-1], names)).encode()
    if not target.exists() or target.read_bytes() != content:
        temporary = train_dir / f"{_STATE}.tmp{uuid.uuid4().hex}"
        temporary.write_bytes(content)
        os.replace(temporary, target)


def remove(path: str | os.PathLike) -> None:
    for file in files_of(path):
        file.unlink()


def remove_others(folder: pathlib.Path, name: str) -> None:
    """Removes all checkpoints in a folder but one, including halves that an interruption left."""
    for other in {file[1] for file in _files(folder)} - {name}:
        remove(folder / other)


def step_of(path: str) -> int:
    """Returns the step of a checkpoint from its name; RunError if the name has none."""
    step = path.rpartition("-")[2]
    if not (step.isascii() and step.isdigit()):
        raise errors.RunError(f"checkpoint {path}: its name must end in -STEP, as in {PREFIX}-1000.")
    return int(step)


class Checkpoints:
    """Saves the variables of one graph into a train_dir and keeps the newest checkpoints; keep=0: all of them.

    Create it before the graph is finalised.
    """

    def __init__(self, train_dir: pathlib.Path, variables: list[tf.Variable], keep: int):
        self._train_dir = train_dir
        self._variables = {variable.op.name: variable for variable in variables}
        self._saver = v1.train.Saver(self._variables)
        v1.add_to_collection(v1.GraphKeys.SAVERS, self._saver)  # where a CheckpointSaverHook of the user's looks
        self._keep = keep

    def save(self, session: v1.Session, step: int) -> str:
        """Writes one checkpoint, then removes the oldest ones; returns its path. Raises OpError or OSError if it could
        not be written; all earlier ones are still there."""
        path = str(self._train_dir / f"{PREFIX}-{step}")
        # Without Saver.save's own bookkeeping, which drops a checkpoint from its list before the new one is written.
        definition = self._saver.saver_def
        session.run(definition.save_tensor_name, {definition.filename_tensor_name: path})
        paths = existing(self._train_dir)
        newest = paths[-self._keep :]
        _write_list(self._train_dir, newest)
        for old in paths[: -len(newest)]:
            remove(old)
        return path

    def plan_restore(
        self, path: str, override: bool, begun_anew: Sequence[str] = ()
    ) -> tuple[Callable[[v1.Session], None], list[str]]:
        """Compares a checkpoint with the graph.

        Args:
          path: of the checkpoint.
          override: initialise variables that the checkpoint lacks.
          begun_anew: names of variables that are initialised in any case.

        Returns:
          A function that sets all variables in a session, and raises RunError if the checkpoint's files are damaged;
            and the names of the variables that it initialises because the checkpoint lacks them.

        Raises:
          RunError: the checkpoint cannot be read, or lacks variables, or has them in another shape or type; with
            override only if it holds nothing of this network.
        """
        restored = {name: variable for name, variable in self._variables.items() if name not in begun_anew}
        others = differences(path, restored)
        matching = {name: variable for name, variable in restored.items() if name not in others}
        nothing_trained = not any(variable.dtype.base_dtype.is_floating for variable in matching.values())
        if others and (nothing_trained or not override):
            shown = "; ".join(list(others.values())[:4])
            way_out = "." if nothing_trained else ", or --override to initialise these variables afresh."
            raise errors.RunError(
                f"{path} does not fit this network: {shown}{' ...' if len(others) > 4 else ''}. "
                f"Give another --train_dir{way_out}"
            )
        saver, fresh = v1.train.Saver(matching), (*others, *begun_anew)
        initializers = [self._variables[name].initializer for name in fresh]

        def restore_all(session: v1.Session) -> None:
            restore(saver, session, path)
            session.run(initializers)

        return restore_all, list(others)


def differences(path: str, variables: dict[str, tf.Variable]) -> dict[str, str]:
    """Returns {name: shape and type in the graph and in a checkpoint} of variables that the checkpoint lacks or has
    otherwise; RunError if it cannot be read."""
    reader = _reader(path)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    different = {}
    for name, variable in variables.items():
        in_graph = f"{variable.dtype.base_dtype.name}{variable.shape.as_list()}"
        saved = f"{dtypes[name].name}{list(shapes[name])}" if name in shapes else "none"
        if saved != in_graph:
            different[name] = f"{name}: graph {in_graph}, checkpoint {saved}"
    return different


def variable_names(path: str) -> list[str]:
    """Returns the names of a checkpoint's variables; RunError if it cannot be read."""
    return sorted(_reader(path).get_variable_to_shape_map())


def _reader(path: str):
    try:
        return tf.train.load_checkpoint(path)
    except (tf.errors.OpError, ValueError) as error:
        raise errors.RunError(f"checkpoint {path} cannot be read: {errors.reason(error)}.") from None


def restore(saver: v1.train.Saver, session: v1.Session, path: str) -> None:
    """Restores a saver's variables; RunError if the checkpoint's files are damaged or lack them."""
    try:
        # As saver.restore, without the page of explanations that it puts around errors.
        session.run(saver.saver_def.restore_op_name, {saver.saver_def.filename_tensor_name: path})
    except (tf.errors.OpError, ValueError, OSError) as error:
        why = errors.reason(error)
        advice = "Put its files back as they were, or move them away so that the one before is used."
        if "not found in checkpoint" in why:
            advice = "It is of another network: use the code that it was trained with, or begin another run."
        raise errors.RunError(f"checkpoint {path} cannot be restored: {why}. {advice}") from None


def newest_intact(train_dir: pathlib.Path) -> tuple[str, list[str]]:
    """Finds the newest undamaged checkpoint of a train_dir that has any, and renames later ones to damaged-*.

    Goes by the files, not by TensorFlow's list of them, which may be damaged or outdated, and corrects the list.
    Only for the holder of the train_dir's lock.

    Returns:
      The checkpoint's path, and a line for each checkpoint that was set aside.

    Raises:
      RunError: none is intact. Nothing is renamed then.
    """
    paths, damaged = existing(train_dir), {}
    while paths and (reason := damage(paths[-1])):
        damaged[paths.pop()] = reason
    if not paths:
        path, reason = next(iter(damaged.items()))
        raise errors.RunError(
            f"--train_dir={train_dir}: all its checkpoints are damaged ({len(damaged)}; the newest, {path}: "
            f"{reason}). Put their files back from a copy, or remove them and {train_dir / _STATE} to "
            "start at step 0."
        )
    notes = []
    for path, reason in damaged.items():
        for file in files_of(path):
            file.rename(file.with_name(f"damaged-{file.name}"))
        notes.append(
            f"*** Checkpoint {path} is damaged ({reason}): set aside as damaged-{os.path.basename(path)}*; "
            f"going on from {os.path.basename(paths[-1])}."
        )
    _write_list(train_dir, paths)
    return paths[-1], notes


def damage(path: str) -> str | None:
    """Reads every tensor of a checkpoint, which compares all checksums; returns the damage, None if there is none.

    TensorFlow's checksums (CRC-32C) cover every byte of the data and every byte of the index that a restore uses.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # damage raises OpError, IndexError, MemoryError ...
        return errors.reason(error)
    return None


def remove_leftovers(train_dir: pathlib.Path) -> None:
    """Removes what interrupted writes left: temporary files, and checkpoint data without an index, which is renamed
    into place after its data and removed before it. Only for the holder of the train_dir's lock."""
    complete = {os.path.basename(path) for path in existing(train_dir)}
    orphans = [file[0] for file in _files(train_dir) if file[1] not in complete]
    for name in [*orphans, *filter(_TEMPORARY.fullmatch, os.listdir(train_dir))]:
        with contextlib.suppress(IsADirectoryError):  # not ours
            os.remove(train_dir / name)
