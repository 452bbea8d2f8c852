"""Access to a run's files that accepts regular files only."""

import errno
import os
import pathlib
import stat
from typing import IO

from tower_train import errors
from tower_train.console import one_line

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
          stat.S_IFBLK: "a device"}  # fmt: skip
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
_FLAGS = {"rb": os.O_RDONLY, "a+b": _APPEND, "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL}


def open_regular(path: str | os.PathLike, mode: str) -> IO[bytes]:
    """Opens a regular file and never waits for another process. Files to append to are not buffered.

    Args:
      path: of the file. A symbolic link is followed for reading only: a run from elsewhere may link to any file.
      mode: as of the built-in open: rb, a+b or xb.

    Raises:
      OSError: it cannot be opened, or is a FIFO, a directory, a device, a socket or, to append to, a symbolic link.
    """
    check_regular(path)
    if mode != "rb" and os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))
    descriptor = os.open(path, _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, mode.replace("x", "w"), buffering=0 if mode == "a+b" else -1)


def check_regular(path: str | os.PathLike) -> None:
    """Raises OSError if something else than a regular file is at the path."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    _check(status, path)


def refuse_others(path: pathlib.Path) -> None:
    """Raises RunError if something else than a regular file is at the path."""
    try:
        check_regular(path)
    except (OSError, ValueError) as error:  # an inaccessible file is reported when it is needed
        if getattr(error, "errno", None) == errno.EINVAL:
            raise errors.RunError(f"{one_line(path)} cannot be of a run ({error.strerror}). Move it away.") from None


def _check(status: os.stat_result, path: str | os.PathLike) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))


def read(path: pathlib.Path, most_bytes: int) -> bytes:
    """Reads a regular file; OSError if it cannot be read, is no regular file, or is longer than most_bytes."""
    with open_regular(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= most_bytes and len(content := file.read(most_bytes + 1)) <= most_bytes:
            return content
    raise OSError(errno.EFBIG, f"it is longer than {most_bytes >> 20} MiB", os.fspath(path))
