"""Opening, reading and locking files that anybody may have put there. No TensorFlow here."""

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

MOST_BYTES = 2**30  # of a file that is read as a whole, such as an image or metrics.jsonl


def open_in_run(path: str | os.PathLike, mode: str):
    """Opens a file of a run, unbuffered; OSError for a link, as a run is data and writes nowhere else, or a FIFO."""
    return _open(path, mode, os.O_NOFOLLOW)


def read_in_run(path: str | os.PathLike) -> bytes:
    """Reads a file of a run; OSError as `open_in_run`, or if it has more than MOST_BYTES."""
    with open_in_run(path, "rb") as file:
        return _read(file, MOST_BYTES)


def read(path: str | os.PathLike, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a user's file; OSError for a FIFO or a device, which may have no end, or for more than most_bytes."""
    with _open(path, "rb") as file:
        return _read(file, most_bytes)


def _open(path: str | os.PathLike, mode: str, flags: int = 0):
    def opener(path: str, flags_of_mode: int) -> int:
        return os.open(path, flags_of_mode | flags | os.O_NONBLOCK, 0o666)  # a FIFO would wait for its other end

    try:
        file = open(path, mode, buffering=0, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return file


def _read(file, most_bytes: int) -> bytes:
    if (size := os.fstat(file.fileno()).st_size) > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", file.name)
    return file.readall()


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
