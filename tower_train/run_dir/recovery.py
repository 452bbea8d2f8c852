"""What an interrupted or damaged past may have left in a train_dir, put right before a run goes on in it.

Call these under the train_dir's lock only: what looks left over may else be another trainer's work of this moment.
"""

import os
import pathlib
import re

import tensorflow as tf

from tower_train import errors
from tower_train.run_dir import checkpoint, directory

# Files of a write that was not brought to its end: TensorFlow's checkpoint and its list, our JSON files and batches.
_LEFTOVER = re.compile(
    rf"{re.escape(checkpoint.PREFIX)}-\d+\.(index|data-\d{{5}}-of-\d{{5}})\.tempstate\d+"
    rf"|{checkpoint.STATE}\.tmp[0-9a-f]{{32}}"
    rf"|\.({'|'.join(map(re.escape, (directory.RUN, directory.RESULT, directory.METRICS, directory.BEST)))})\.\d+"
    r"|\.bad_batch-\d+\.\d+"
)
_DATA = re.compile(rf"({re.escape(checkpoint.PREFIX)}-\d+)\.data-\d{{5}}-of-\d{{5}}")


def remove_leftovers(train_dir: pathlib.Path) -> list[str]:
    """Removes the temporary files of writes that were interrupted, and checkpoint data whose index was never written.

    An index is renamed into place after its data, and removed before it: data without one that is not on TensorFlow's
    list is of a save or of a removal that was interrupted. What is on the list was complete and stays.

    Returns:
      The names of the removed files.
    """
    listed = checkpoint.listed_names(train_dir)
    removed = []
    for name in sorted(os.listdir(train_dir)):
        data = _DATA.fullmatch(name)
        orphan = data and data[1] not in listed and not (train_dir / f"{data[1]}.index").exists()
        if orphan or _LEFTOVER.fullmatch(name):
            os.remove(train_dir / name)
            removed.append(name)
    return removed


def newest_intact(train_dir: pathlib.Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint all of whose checksums are right; those after it are set aside under another name.

    Goes by the files, not by TensorFlow's list of them, which may be damaged or behind; the list is put right.

    Returns:
      The checkpoint's path, None where none was saved; and a line for each that was set aside.

    Raises:
      RunError: there are checkpoints, or there were, and none is intact. Nothing is renamed then.
    """
    damaged = {}
    newest = checkpoint.latest(train_dir)
    for path in reversed(checkpoint.existing(train_dir)):
        reason = damage(path)
        if not reason:
            newest = path
            break
        damaged[path] = reason
    else:
        if damaged:
            path, reason = next(iter(damaged.items()))
            raise errors.RunError(
                f"--train_dir={train_dir}: all its checkpoints are damaged ({len(damaged)}; the newest, {path}: "
                f"{reason}). Put their files back from a copy, or remove them and {train_dir / checkpoint.STATE} to "
                "start at step 0."
            )
    notes = [
        f"*** Checkpoint {path} is damaged ({reason}): set aside as {_set_aside(path)}*; "
        f"going on from {os.path.basename(newest)}."
        for path, reason in damaged.items()
    ]
    if newest:
        checkpoint.write_list(train_dir, checkpoint.existing(train_dir))
    return newest, notes


def damage(path: str) -> str | None:
    """What is wrong with a checkpoint's files, by reading every tensor, which compares all checksums; None if nothing.

    TensorFlow's checksums (CRC-32C) cover every byte of the data and of the index that a restore makes use of.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # the reader raises what its C++ makes of damage: OpError, IndexError, MemoryError ...
        return checkpoint.reason(error)
    return None


def _set_aside(path: str) -> str:
    """Renames a checkpoint's files and returns what their names begin with now."""
    folder, name = os.path.split(path)
    files = [file for file in os.listdir(folder) if checkpoint.is_file_of(file, name)]
    number, prefix = 1, "damaged-"
    while any(os.path.lexists(os.path.join(folder, prefix + file)) for file in files):
        number += 1
        prefix = f"damaged-{number}-"
    for file in sorted(files, reverse=True):  # the index first: what is renamed by half is no checkpoint any more
        os.rename(os.path.join(folder, file), os.path.join(folder, prefix + file))
    return prefix + name
