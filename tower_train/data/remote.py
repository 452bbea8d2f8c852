"""Files from the network, by requests: with a time-out, of the expected size and checksum.

Not by `keras.utils.get_file`, which has no time-out, so that a silent server holds the run for ever.
"""

import dataclasses
import hashlib
import os
import pathlib
import sys
import urllib.parse
from collections.abc import Callable

import requests

from tower_train import console, errors
from tower_train.data import publish

_CHUNK_BYTES = 2**17


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file's address, exact size and checksum: (hashlib's name of a hash, its hex digest)."""

    url: str
    num_bytes: int
    checksum: tuple[str, str]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class FetchError(Exception):
    """A failed download; the text goes on after the name of what was to be downloaded."""


def fetch(remote: RemoteFile, path: str | os.PathLike, timeout_secs: float = 15) -> None:
    """Downloads a file to `path`, which is replaced, and verifies it. Says so in a line, with a progress bar if stderr
    is a terminal. The server may be silent for timeout_secs.

    Raises:
      FetchError: no network, a server that answers late or wrongly, or an unexpected file.
      OSError: the path cannot be written.
    """
    site = urllib.parse.urlsplit(remote.url).hostname
    console.notice(f"Downloading {remote.name} ({remote.num_bytes / 1e6:.3g} MB) from {site}")
    hash_name, expected = remote.checksum
    received, digest, problem = 0, hashlib.new(hash_name, usedforsecurity=False), ""
    unpacked_by_none = {"Accept-Encoding": "identity"}
    try:
        with (
            requests.get(remote.url, stream=True, timeout=timeout_secs, headers=unpacked_by_none) as response,
            open(path, "wb") as file,
            console.ProgressBar(_columns, remote.num_bytes, stream=sys.stderr, name=remote.name) as bar,
        ):
            response.raise_for_status()
            for chunk in response.iter_content(_CHUNK_BYTES):
                received += len(chunk)
                bar.update(advance=len(chunk))
                file.write(chunk)
                digest.update(chunk)
                if received > remote.num_bytes:  # perhaps without end
                    break
    except requests.RequestException as error:
        problem = _reason(error)
    if not problem and received != remote.num_bytes:
        problem = f"got {received} bytes instead of {remote.num_bytes}"
    elif not problem and digest.hexdigest() != expected:
        problem = f"got a file whose {hash_name} is {digest.hexdigest()}, not {expected}"
    if problem:
        raise FetchError(f"could not be downloaded from {remote.url}: {problem}")


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


def _reason(error: BaseException) -> str:
    """Returns the system's words for the first cause, which requests and urllib3 wrap several times."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _columns(progress) -> tuple:
    return (
        progress.TextColumn("{task.fields[name]}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
