"""Checkpoints in TensorFlow's own format: finding, saving, comparing, restoring and repairing them."""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors, files
from tower_train.run_dir import disk

v1 = tf.compat.v1
PREFIX = "model.ckpt"
_STATE = "checkpoint"  # the file in which TensorFlow lists them
_FILE = re.compile(rf"({re.escape(PREFIX)}-[0-9]{{1,18}})\.(index|data-[0-9]{{5}}-of-[0-9]{{5}})")
# Files of an interrupted write: TensorFlow's of a checkpoint, and ours (disk.replace).
_TEMPORARY = re.compile(
    rf"{_FILE.pattern}\.tempstate[0-9]+|\.({_STATE}|run\.json|result\.json|metrics\.jsonl|best\.json)\.[0-9a-f]{{8}}"
)


def latest(train_dir: pathlib.Path) -> str | None:
    """Returns the path of the newest complete checkpoint; None if none was saved. RunError if all are gone."""
    paths = existing(train_dir) or existing(train_dir)  # the trainer may replace the only one meanwhile
    if not paths and (train_dir / _STATE).exists():
        raise errors.RunError(
            f"{train_dir / _STATE} lists checkpoints of which none is there. Put them back, or remove that file to "
            "start at step 0."
        )
    return paths[-1] if paths else None


def existing(folder: pathlib.Path) -> list[str]:
    """Returns the paths of complete checkpoints, oldest first, whether or not TensorFlow lists them."""
    # TensorFlow renames the index into place last, so a checkpoint with an index is complete
    return [str(folder / name) for name, paths in _files(folder).items() if paths[0].suffix == ".index"]


def _files(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns {checkpoint's name: its files} in a folder, which need not exist, oldest first.

    A checkpoint's index comes first: without it the rest is no checkpoint. Remove or rename files in this order, and
    make them in the reverse, so that an interruption leaves no half.
    """
    paths = {}
    names = filter(None, map(_FILE.fullmatch, os.listdir(folder))) if os.path.isdir(folder) else ()
    for name in sorted(names, key=lambda name: (saved_step(name[1]), name[2] != "index", name[2])):
        paths.setdefault(name[1], []).append(folder / name[0])
    return paths


def list_files(path: str | os.PathLike) -> list[pathlib.Path]:
    """Returns a checkpoint's files, its index first."""
    return _files(pathlib.Path(path).parent).get(os.path.basename(path), [])


def _write_list(train_dir: pathlib.Path, paths: list[str]) -> None:
    """Lists these checkpoints, oldest first, in TensorFlow's file, by names that survive a move of the folder."""
    names, target = [os.path.basename(path) for path in paths], train_dir / _STATE
    # Not train.update_checkpoint_state, which prints three lines about its own deprecation.
    content = str(v1.train.generate_checkpoint_state_proto(os.path.abspath(train_dir), names[-1], names)).encode()
    if not target.exists() or files.read_in_run(target) != content:
        disk.replace(target, content)


def remove_others(folder: pathlib.Path, kept: list[str]) -> None:
    """Removes all checkpoints in a folder but these, including halves that an interruption left."""
    for name, paths in _files(folder).items():
        for file in paths if str(folder / name) not in kept else ():
            file.unlink()


def saved_step(path: str) -> int:
    """Returns the step in a checkpoint's name."""
    return int(path.rpartition("-")[2])


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
        """Writes one checkpoint, then removes the oldest ones; returns its path. OpError or OSError if it could not be
        written; all earlier ones are then still there."""
        path = str(self._train_dir / f"{PREFIX}-{step}")
        # Without Saver.save's own bookkeeping, which drops a checkpoint from its list before the new one is written.
        definition = self._saver.saver_def
        session.run(definition.save_tensor_name, {definition.filename_tensor_name: path})
        # TensorFlow waits for no disk; after a loss of power the list is to name whole checkpoints
        for written in (*list_files(path), self._train_dir):
            disk.sync(written)
        newest = existing(self._train_dir)[-self._keep :]
        _write_list(self._train_dir, newest)
        remove_others(self._train_dir, newest)
        return path

    def plan_restore(self, path: str, override: bool) -> tuple[Callable[[v1.Session], None], list[str]]:
        """Compares the checkpoint at a path with the graph.

        Returns:
          A function that sets all variables in a session (RunError if the files are damaged), and the names of those
            that it initialises afresh, which only `override` allows.

        Raises:
          RunError: the checkpoint cannot be read, or lacks variables, or has them in another shape or type; with
            override only if it holds nothing of this network.
        """
        opened = reader(path)
        shapes, dtypes = opened.get_variable_to_shape_map(), opened.get_variable_to_dtype_map()
        step = opened.get_tensor("global_step") if shapes.get("global_step") == [] else None
        if step not in (None, saved_step(path)) and not override:
            raise errors.RunError(
                f"{path} holds step {step}. Give its files the name that they had, or move them away."
            )
        others = {}
        for name, variable in self._variables.items():
            in_graph = f"{variable.dtype.base_dtype.name}{variable.shape.as_list()}"
            saved = f"{dtypes[name].name}{list(shapes[name])}" if name in shapes else "none"
            if saved != in_graph:
                others[name] = f"{name}: graph {in_graph}, checkpoint {saved}"
        matching = {name: variable for name, variable in self._variables.items() if name not in others}
        nothing_trained = not any(variable.dtype.base_dtype.is_floating for variable in matching.values())
        if others and (nothing_trained or not override):
            shown = "; ".join(list(others.values())[:4])
            way_out = "." if nothing_trained else ", or --override to initialise these variables afresh."
            raise errors.RunError(
                f"{path} does not fit this network: {shown}{' ...' if len(others) > 4 else ''}. "
                f"Give another --train_dir{way_out}"
            )
        saver = v1.train.Saver(matching) if others else self._saver
        initializers = [self._variables[name].initializer for name in others]

        def restore_all(session: v1.Session) -> None:
            restore(saver, session, path)
            session.run(initializers)

        return restore_all, list(others)


def reader(path: str):
    """Opens a checkpoint, as tf.train.load_checkpoint does; RunError if it cannot be read."""
    try:
        return tf.train.load_checkpoint(path)
    except (tf.errors.OpError, ValueError, OSError) as error:
        raise errors.RunError(f"checkpoint {path} cannot be read: {errors.reason(error)}.") from None


def restore(saver: v1.train.Saver, session: v1.Session, path: str) -> None:
    """Restores a saver's variables; RunError if the checkpoint's files are damaged or lack them."""
    try:
        # As saver.restore, without the page of explanations that it puts around errors.
        session.run(saver.saver_def.restore_op_name, {saver.saver_def.filename_tensor_name: path})
    except (tf.errors.OpError, ValueError, OSError) as error:
        why = _missing(path) or errors.reason(error)
        advice = "Put its files back as they were, or move them away so that the one before is used."
        if "not found in checkpoint" in why:
            advice = "It is of another network: use the code that it was trained with, or begin another run."
        raise errors.RunError(f"checkpoint {path} cannot be restored: {why}. {advice}") from None


def newest_intact(train_dir: pathlib.Path) -> tuple[str, list[str]]:
    """Finds the newest undamaged checkpoint of a locked train_dir that has any, renames later ones to damaged-*, and
    corrects TensorFlow's list; also returns a line for each that was set aside.

    Raises:
      RunError: none is intact, or one may not be read, and nothing is renamed; or the list cannot be corrected.
    """
    paths, damaged = existing(train_dir), {}
    while paths and (reason := damage(paths[-1])):
        for file in list_files(paths[-1]):
            if not os.access(file, os.R_OK):  # which is no damage, and nothing to set aside
                raise errors.RunError(f"{file} cannot be read: this user has no permission to. Give it that.")
        damaged[paths.pop()] = reason
    if not paths:
        path, reason = next(iter(damaged.items()))
        raise errors.RunError(
            f"--train_dir={train_dir}: all its checkpoints are damaged ({len(damaged)}; the newest, {path}: "
            f"{reason}). Put their files back from a copy, or remove them and {train_dir / _STATE} to "
            "start at step 0."
        )
    try:
        for file in itertools.chain.from_iterable(map(list_files, damaged)):
            file.rename(file.with_name(f"damaged-{file.name}"))
        _write_list(train_dir, paths)
    except OSError as error:
        written = error.filename2 or train_dir / _STATE
        raise errors.RunError(f"{written} cannot be written ({error.strerror}). Make room.") from None
    return paths[-1], [
        f"*** Checkpoint {path} is damaged ({reason}): set aside as damaged-{os.path.basename(path)}*; "
        f"going on from {os.path.basename(paths[-1])}."
        for path, reason in damaged.items()
    ]


def damage(path: str) -> str | None:
    """Reads every tensor of a checkpoint, which compares all checksums; returns the damage, None if there is none."""
    try:
        opened = tf.train.load_checkpoint(path)
        for name in opened.get_variable_to_shape_map():
            opened.get_tensor(name)
    except Exception as error:  # damage raises OpError, IndexError, MemoryError ...
        return _missing(path) or errors.reason(error)
    return None


def _missing(path: str) -> str | None:
    """Names a checkpoint's data file if it is missing, which TensorFlow does in words of its own."""
    is_there = any(".data-" in file.name for file in list_files(path))
    return None if is_there else f"its file {os.path.basename(path)}.data-00000-of-00001 is missing"


def remove_leftovers(train_dir: pathlib.Path) -> None:
    """Removes what interrupted writes left in a locked train_dir: temporary files, and data without an index."""
    remove_others(train_dir, existing(train_dir))
    for name in filter(_TEMPORARY.fullmatch, os.listdir(train_dir)):
        with contextlib.suppress(IsADirectoryError):  # not ours
            os.remove(train_dir / name)
