"""Folders that appear whole or not at all, even if processes are killed or several want the same one."""

import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable

from tower_train import console, files


def publish_folder(
    folder: pathlib.Path,
    fill: Callable[[pathlib.Path], None],
    is_complete: Callable[[pathlib.Path], bool],
    name: str = "",
) -> None:
    """Makes `folder` unless it is complete: `fill` writes into a folder beside it, which is then renamed.

    Processes that want the same folder take turns: the first one makes it, the others find it made. The lock ends with
    its process, so a partial folder that its holder finds belongs to a dead process, and is removed.

    Args:
      fill: writes everything into the (empty) folder it is given.
      is_complete: whether the folder, which may not exist, is complete. If it exists and is not, it is replaced;
        `is_complete` may raise to prevent that.
      name: of the work, if folders of several names are made in one place by turns; the folder's own if empty.

    Raises:
      OSError: the disk is full or may not be written. No exception leaves anything half-done.
    """
    if is_complete(folder):  # also where nothing may be written
        return
    partial, path = (folder.with_name(f".{name or folder.name}.{kind}") for kind in ("partial", "lock"))
    with files.made(folder.parent):
        while not is_complete(folder):
            with files.open_in_run(path, "ab") as lock:
                _wait_for(lock, folder)
                if not files.is_at(lock, path):  # removed by its last holder, who is done
                    continue
                try:
                    return _make(folder, partial, fill)
                finally:
                    path.unlink(missing_ok=True)


def _make(folder: pathlib.Path, partial: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> None:
    old = partial.with_suffix(".old")
    shutil.rmtree(partial, ignore_errors=True)
    _put_back(old, folder)
    try:
        partial.mkdir()
        fill(partial)
        if folder.exists():
            os.rename(folder, old)  # a death before the next line would leave neither, if it were removed
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _put_back(old, folder)


def _put_back(old: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts back what was to be replaced if nothing took its place, and else removes it."""
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _wait_for(lock, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.notice(f"Another process is making {folder}; waiting for it.")
        fcntl.flock(lock, fcntl.LOCK_EX)
