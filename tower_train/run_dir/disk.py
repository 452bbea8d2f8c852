"""Files that survive a power loss: their contents are on the disk before their names."""

import contextlib
import errno
import os
import pathlib
import secrets

from tower_train import errors, files


def sync(path: str | os.PathLike) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):  # some network file systems cannot do so with folders
            raise
    finally:
        os.close(descriptor)


def write(path: pathlib.Path, content: bytes) -> None:
    """As `replace`, for a file that the user asked for: ConfigError if it cannot be written."""
    try:
        replace(path, content)
    except OSError as error:
        raise errors.ConfigError(f"{path} cannot be written: {error.strerror}. Name another with --out.") from None


def replace(path: pathlib.Path, content: bytes) -> None:
    """Gives a file new content as a whole; raises OSError, and the file stays as it was."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))  # as /dev/stdout, which would be gone
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # a name that nobody can have taken
    try:
        with files.open_in_run(temporary, "xb") as file:
            rest = memoryview(content)
            while rest:  # what a full disk has no room for is an error at the second try only
                rest = rest[file.write(rest) :]
        sync(temporary)  # else the name may be on the disk first, and the file empty
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    sync(path.parent)
