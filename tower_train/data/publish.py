"""Folders that appear whole or not at all, whichever processes are killed or want the same one."""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from tower_train import console, locks

_PARTIAL_SUFFIX = ".partial"


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
    partial = folder.with_name(f".{folder.name}{_PARTIAL_SUFFIX}")
    with locks.made(folder.parent):
        while True:
            with _turn(folder) as is_ours:
                if is_complete(folder):
                    return
                if is_ours:
                    return _make(folder, partial, fill)


@contextlib.contextmanager
def _turn(folder: pathlib.Path) -> Iterator[bool]:
    """Waits for the processes that make a folder; yields whether it is now this one's turn.

    It is not if the previous process has removed the lock file, as each does in the end.
    """
    path = folder.with_name(f".{folder.name}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        _wait_for(lock, folder)
        is_ours = locks.is_at(lock, path)
        try:
            yield is_ours
        finally:
            if is_ours:
                path.unlink(missing_ok=True)


def _make(folder: pathlib.Path, partial: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> None:
    _remove(partial)
    try:
        partial.mkdir()
        fill(partial)
        _remove(folder)
        os.rename(partial, folder)
    finally:
        _remove(partial)


def _wait_for(lock, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.notice(f"Another process is making {folder}; waiting for it.")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _remove(folder: pathlib.Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
