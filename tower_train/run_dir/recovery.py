"""Repairs a train_dir before a run resumes in it: sets damaged checkpoints aside and removes leftovers.

Call these functions only under the train_dir's lock: a file that looks left over may be another trainer's.
"""

import contextlib
import os
import pathlib
import re

import tensorflow as tf

from tower_train import errors
from tower_train.run_dir import checkpoint, directory

# Files of an interrupted write: of TensorFlow's checkpoint and its list, of our JSON files and of batches.
_TEMPORARY = re.compile(
    rf"{checkpoint.FILE.pattern}\.tempstate[0-9]+"
    rf"|{checkpoint.STATE}\.tmp[0-9a-f]{{32}}"
    rf"|\.({'|'.join(map(re.escape, (directory.RUN, directory.RESULT, directory.METRICS, directory.BEST)))})\.\d+"
    r"|\.bad_batch-\d+\.\d+"
)


def newest_intact(train_dir: pathlib.Path) -> tuple[str, list[str]]:
    """Finds the newest undamaged checkpoint of a train_dir that has any, and sets later ones aside under another name.

    Goes by the files, not by TensorFlow's list of them, which may be damaged or outdated, and corrects the list.

    Returns:
      The checkpoint's path, and a line for each checkpoint that was set aside.

    Raises:
      RunError: none is intact. Nothing is renamed then.
    """
    paths, damaged = checkpoint.existing(train_dir), {}
    while paths and (reason := damage(paths[-1])):
        damaged[paths.pop()] = reason
    if not paths:
        path, reason = next(iter(damaged.items()))
        raise errors.RunError(
            f"--train_dir={train_dir}: all its checkpoints are damaged ({len(damaged)}; the newest, {path}: "
            f"{reason}). Put their files back from a copy, or remove them and {train_dir / checkpoint.STATE} to "
            "start at step 0."
        )
    notes = [
        f"*** Checkpoint {path} is damaged ({reason}): set aside as {_set_aside(path)}*; "
        f"going on from {os.path.basename(paths[-1])}."
        for path, reason in damaged.items()
    ]
    checkpoint.write_list(train_dir, paths)
    return paths[-1], notes


def damage(path: str) -> str | None:
    """Reads every tensor of a checkpoint, which compares all checksums; returns the damage, None if there is none.

    TensorFlow's checksums (CRC-32C) cover every byte of the data and every byte of the index that a restore uses.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        if why := checkpoint.oversized(path, reader):
            return why
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # damage raises OpError, IndexError, MemoryError ...
        return errors.reason(error)
    return None


def _set_aside(path: str) -> str:
    """Renames a checkpoint's files and returns the beginning of their new names."""
    files = checkpoint.files_of(path)
    number, prefix = 1, "damaged-"
    while any(os.path.lexists(file.with_name(prefix + file.name)) for file in files):
        number += 1
        prefix = f"damaged-{number}-"
    for file in files:
        file.rename(file.with_name(prefix + file.name))
    return prefix + os.path.basename(path)


def remove_leftovers(train_dir: pathlib.Path) -> None:
    """Removes temporary files of interrupted writes, and checkpoint data without an index.

    An index is renamed into place after its data, and removed before it. So data without an index are left by an
    interrupted save or removal, unless TensorFlow lists the checkpoint: then it was complete, and the data stay.
    """
    listed = checkpoint.listed_names(train_dir)
    for name in os.listdir(train_dir):
        file = checkpoint.FILE.fullmatch(name)
        is_orphan = file and file[1] not in listed and not (train_dir / f"{file[1]}.index").exists()
        if is_orphan or _TEMPORARY.fullmatch(name):
            with contextlib.suppress(IsADirectoryError):  # not ours
                os.remove(train_dir / name)
