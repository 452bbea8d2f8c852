"""Opening, reading and locking files of a run, which anybody may have put there. No TensorFlow here."""

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

MOST_BYTES = 2**30  # of a file that is read as a whole, such as metrics.jsonl


def open_in_run(path: str | os.PathLike, mode: str):
    """Opens a file of a run, unbuffered; OSError for a link, as a run is data and writes nowhere else, or a FIFO."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a FIFO would wait for its other end

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


def read_in_run(path: str | os.PathLike) -> bytes:
    """Reads a file of a run; OSError as `open_in_run`, or if it has more than MOST_BYTES."""
    with open_in_run(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read", file.name)
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
