"""Files from the network: fetched within bounded time and size, and verified.

Not by `keras.utils.get_file`, which has no timeout, so a silent server holds the run for ever, and takes half a file
from a killed run for a whole one.
"""

import dataclasses
import hashlib
import os
import pathlib
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent import futures

import requests
import urllib3

from tower_train import console
from tower_train.data import publish

_CHUNK_BYTES = 2**18
_LEAST_BYTES_PER_SEC = 2**12  # at which CIFAR-10 takes eleven hours


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
    """A failed download; the text gives the user the reason."""


def fetch(remote: RemoteFile, path: str | os.PathLike, connect_secs: float = 10, read_secs: float = 15) -> None:
    """Downloads a file to `path` and verifies it. Says so in a line, with a progress bar if stderr is a terminal.

    Args:
      path: its target, which is replaced. After a failure it holds nothing of use.
      connect_secs: time limit of name look-up, connection and first answer together.
      read_secs: time for which the server may then be silent.

    Raises:
      FetchError: no network, a server that answers late, slowly or wrongly, or an unexpected file.
      OSError: the path cannot be written.
    """
    site = urllib.parse.urlsplit(remote.url).hostname
    console.notice(f"Downloading {remote.name} ({remote.num_bytes / 1e6:.3g} MB) from {site}")
    hash_name, expected = remote.checksum
    received, digest = 0, hashlib.new(hash_name, usedforsecurity=False)
    with (
        _open(remote.url, connect_secs, read_secs) as response,
        open(path, "wb") as file,
        console.ProgressBar(_columns, remote.num_bytes, stream=sys.stderr, name=remote.name) as bar,
    ):
        for chunk in _chunks(response, read_secs):
            received += len(chunk)
            bar.update(advance=len(chunk))
            file.write(chunk)
            digest.update(chunk)
            if received > remote.num_bytes:
                break
    if received != remote.num_bytes:
        raise FetchError(f"got {received} bytes of {_kind(remote)} that has {remote.num_bytes}")
    if digest.hexdigest() != expected:
        raise FetchError(f"got {_kind(remote)} whose {hash_name} is {digest.hexdigest()}, not {expected}")


def publish_folder(
    folder: pathlib.Path, fill: Callable[[pathlib.Path], None], is_complete: Callable[[pathlib.Path], bool]
) -> None:
    """Makes a folder as `publish.publish_folder`, but keeps a user's files that are there. Raises FetchError if the
    folder cannot be written or holds other files; and whatever `fill` raises."""

    def is_there(there: pathlib.Path) -> bool:
        if not (complete := is_complete(there)) and there.exists() and any(there.iterdir()):
            raise FetchError(f"{there} is in the way, it holds other files")
        return complete

    try:
        publish.publish_folder(folder, fill, is_there)
    except OSError as error:
        raise FetchError(f"{folder} cannot be written: {error.strerror or error}") from None


def _kind(remote: RemoteFile) -> str:
    return "an archive" if ".tar" in remote.name else "a file"


def _open(url: str, connect_secs: float, read_secs: float) -> requests.Response:
    """Returns the response to GET, from a thread, because name look-up has no timeout of its own."""
    opened: futures.Future[requests.Response] = futures.Future()

    def work():
        try:
            as_it_is = {"Accept-Encoding": "identity"}
            opened.set_result(requests.get(url, stream=True, timeout=(connect_secs, read_secs), headers=as_it_is))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        response = opened.result(connect_secs)
    except (futures.TimeoutError, requests.Timeout):
        raise FetchError(f"no answer within {connect_secs:g} seconds") from None
    except requests.RequestException as error:
        raise FetchError(_reason(error)) from None
    if not response.ok:
        response.close()
        raise FetchError(f"HTTP Error {response.status_code}: {response.reason}")
    response.raw.enforce_content_length = False  # the size shows a body that ends early
    return response


def _chunks(response: requests.Response, read_secs: float) -> Iterator[bytes]:
    """Yields the body as it arrives, until it or the connection ends."""
    received, started = 0, time.monotonic()
    try:
        while chunk := response.raw.read1(_CHUNK_BYTES):
            yield chunk
            received += len(chunk)
            seconds = time.monotonic() - started
            if seconds > read_secs + received / _LEAST_BYTES_PER_SEC:
                raise FetchError(f"only {received} bytes in {seconds:.0f} seconds")
    except urllib3.exceptions.ReadTimeoutError:
        raise FetchError(f"no data for {read_secs:g} seconds") from None
    except urllib3.exceptions.HTTPError as error:
        raise FetchError(f"the connection broke: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Returns the system's words for the first cause, which requests and urllib3 wrap several times."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _columns(progress) -> tuple:
    return (
        progress.TextColumn("{task.fields[name]}"), progress.BarColumn(), progress.DownloadColumn(),
        progress.TransferSpeedColumn(), progress.TimeRemainingColumn(),
    )  # fmt: skip
