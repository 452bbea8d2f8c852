"""Folders and lock files that vanish when they are of no use. No TensorFlow here."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


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
