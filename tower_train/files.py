"""Folders of runs and of data, and the files in them, which anybody may have put there. No TensorFlow here."""

import contextlib
import errno
import os
import pathlib
import re
import stat
from collections.abc import Iterator

from tower_train import errors


def open_in_run(path: str | os.PathLike, mode: str):
    """Opens a file of a run, which is data and writes nowhere else, unbuffered; OSError for a link, a FIFO, a device or
    a folder."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a FIFO would wait for its other end

    try:
        file = open(path, mode, buffering=0, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return file


def read_in_run(path: str | os.PathLike) -> bytes:
    """Reads a file of a run; OSError as `open_in_run`."""
    with open_in_run(path, "rb") as file:
        return file.readall()


def check_replaceable(path: pathlib.Path, mark: bytes) -> None:
    """Raises ConfigError if a file is there that has no such mark, and so was written by something else."""
    try:
        is_ours = mark in read_in_run(path)[:2000]
    except FileNotFoundError:
        return
    except OSError as error:
        raise errors.ConfigError(f"{path} cannot be read ({error.strerror}). Move it away.") from None
    if not is_ours:
        raise errors.ConfigError(f"{path} is there, and was not written by this command. Move it away.")


@contextlib.contextmanager
def made(folder: pathlib.Path) -> Iterator[None]:
    """Makes a folder and its parents, or raises OSError; if the block fails, new and empty ones are removed again."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):  # not empty, or not made
                each.rmdir()
        raise


def is_at(file, path: pathlib.Path) -> bool:
    """Returns whether an open file is still the one at a path: an earlier holder of its lock may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def is_remote(path: str) -> bool:
    """Returns whether a path names a place in another system, such as gs://bucket/run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path) is not None  # one slash: pathlib makes that of two


def check_folder(path: str | None, shown: str) -> None:
    """Raises ConfigError for a folder that is in no file system; messages call it `shown`."""
    if path and is_remote(path):
        raise errors.ConfigError(
            f"{shown}: it must be a local or mounted folder, as files are locked and renamed in it. Mount that store, "
            "or give a local folder and copy it later."
        )


def data_directory(data_dir: str | None = None) -> pathlib.Path:
    """Returns a directory of data, --data_dir; if that is None, $TOWER_TRAIN_DATA, or else tower_train in the user's
    cache directory ($XDG_CACHE_HOME or ~/.cache).

    Raises:
      ConfigError: it is not a path of a file system.
      DataError: there is no such home directory as it begins with.
    """
    if data_dir is None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        data_dir = os.environ.get("TOWER_TRAIN_DATA") or os.path.join(cache, "tower_train")
    check_folder(data_dir, data_dir)
    try:
        return pathlib.Path(data_dir).expanduser()
    except RuntimeError:
        raise errors.DataError(
            f"{data_dir}: there is no such home directory. Name a directory with --data_dir."
        ) from None
