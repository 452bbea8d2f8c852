"""Files from the network, with a time-out and a checksum."""

import pathlib
import socket
from collections.abc import Callable
from typing import NamedTuple

from tower_train import errors
from tower_train.data import publish


class RemoteFile(NamedTuple):
    """A file's address and checksum, an MD5 or SHA-256 in hexadecimal digits."""

    url: str
    checksum: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class FetchError(Exception):
    """A failed download; the text goes on after the name of what was to be downloaded."""


def fetch(remote: RemoteFile, folder: pathlib.Path, timeout_secs: float = 15) -> None:
    """Downloads a file by Keras and verifies it; the server may be silent for timeout_secs. Raises FetchError."""
    import keras  # takes half a second

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_secs)  # Keras sets none, so that a silent server would hold the run for ever
    try:
        keras.utils.get_file(remote.name, remote.url, cache_subdir=folder, file_hash=remote.checksum)
    except Exception as error:  # a bare Exception for most failures
        raise FetchError(f"could not be downloaded: {errors.reason(error)}") from None
    finally:
        socket.setdefaulttimeout(before)


def publish_folder(
    name: str,
    folder: pathlib.Path,
    fill: Callable[[pathlib.Path], None],
    is_complete: Callable[[pathlib.Path], bool],
    advice: str,
) -> pathlib.Path:
    """Makes a folder of data of this name as `publish.publish_folder`, but keeps a user's files that are there; returns
    it. Raises DataError, which ends with the advice, for what `fill` cannot fetch, or a folder that cannot be made."""

    def is_there(there: pathlib.Path) -> bool:
        if not (complete := is_complete(there)) and there.exists() and any(there.iterdir()):
            raise FetchError(f"cannot be put into {there}: it is in the way, as it holds other files")
        return complete

    try:
        publish.publish_folder(folder, fill, is_there)
    except FetchError as failure:
        raise errors.DataError(f"{name} {failure}. {advice}") from None
    except OSError as error:
        raise errors.DataError(f"{name} cannot be written to {folder}: {error.strerror or error}. {advice}") from None
    return folder
