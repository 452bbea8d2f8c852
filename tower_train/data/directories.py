"""The directory of the data: the user's, or the default."""

import os
import pathlib

from tower_train import config, errors


def chosen(data_dir: str | None) -> pathlib.Path:
    """Returns the directory of --data_dir, or the default one if it is None; raises as `expanded`."""
    return default_directory() if data_dir is None else expanded(data_dir)


def default_directory() -> pathlib.Path:
    """Returns $TOWER_TRAIN_DATA, or else tower_train in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    if folder := os.environ.get("TOWER_TRAIN_DATA"):
        return expanded(folder)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tower_train"


def expanded(path: str) -> pathlib.Path:
    """Returns a path with ~ replaced by the home directory.

    Raises:
      ConfigError: it is not a path of a file system.
      DataError: there is no such home directory.
    """
    config.check_folder(path, path)
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        raise errors.DataError(f"{path}: there is no such home directory. Name a directory with --data_dir.") from None
