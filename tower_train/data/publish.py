"""Folders that appear whole or not at all, whichever processes are killed or want the same one."""

import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable

from tower_train import console, locks


def publish_folder(
    folder: pathlib.Path, fill: Callable[[pathlib.Path], None], is_complete: Callable[[pathlib.Path], bool]
) -> None:
    """Makes `folder` unless it is complete: `fill` writes into a folder beside it, which is then renamed.

    Processes that want the same folder take turns: the first one makes it, the others find it made. The lock ends with
    its process, so a partial folder that its holder finds belongs to a dead process, and is removed.

    Args:
      folder: the folder to make, with its parents.
      fill: writes everything into the (empty) folder it is given.
      is_complete: whether a folder of that name, which may not exist, is complete. If it exists and is not, it is
        replaced; `is_complete` may raise to prevent that.

    Raises:
      OSError: the disk is full or may not be written. No exception leaves anything half-done.
    """
    if is_complete(folder):  # also where nothing may be written
        return
    partial, path = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "lock"))
    with locks.made(folder.parent):
        while not is_complete(folder):
            with open(path, "ab") as lock:
                _wait_for(lock, folder)
                if not locks.is_at(lock, path):  # removed by its last holder, who is done
                    continue
                try:
                    return _make(folder, partial, fill)
                finally:
                    path.unlink(missing_ok=True)


def _make(folder: pathlib.Path, partial: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        fill(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wait_for(lock, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.notice(f"Another process is making {folder}; waiting for it.")
        fcntl.flock(lock, fcntl.LOCK_EX)
