"""Folders and lock files that are gone again when they are of no use. No TensorFlow here."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def made(folder: pathlib.Path) -> Iterator[None]:
    """Makes a folder and its parents; if the block then fails, those that were not there before and are empty go again.

    Raises:
      OSError: they cannot be made.
    """
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
    """Whether an open file is still the one at a path: whoever held its lock before may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
