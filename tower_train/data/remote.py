"""Files from the network: fetched within bounded time and size, verified, and only then believed.

`keras.utils.get_file` was considered and is not used: it opens connections without a timeout, so a silent server holds
the run for ever, and a run killed meanwhile leaves half a file that the next one takes for a whole one. What is left is
a short loop over `urllib`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import os
import pathlib
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from absl import logging

_CHUNK_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """Where a file is and how it is recognised: its exact size and all of its {hashlib name: hex digest}."""

    url: str
    num_bytes: int
    checksums: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class FetchError(Exception):
    """Why a file could not be had, in words for the user."""


def fetch(remote: RemoteFile, path: str | os.PathLike, connect_secs: float = 10, read_secs: float = 15) -> None:
    """Downloads a file to `path` and verifies it. A progress bar is shown where stderr is a terminal.

    Args:
      remote: what to download.
      path: where to; what lies there is replaced. After a failure it holds nothing of use.
      connect_secs: how long looking up the name, connecting and the first answer may take together.
      read_secs: how long the server may then be silent.

    Raises:
      FetchError: no network, a server that answers late or wrongly, or a file that is not the expected one.
      OSError: the path cannot be written.
    """
    hashes = [hashlib.new(name, usedforsecurity=False) for name, _ in remote.checksums]
    received = 0
    response = _open(remote.url, connect_secs, read_secs)
    with contextlib.closing(response), open(path, "wb") as file, _progress(remote) as advance:
        while received <= remote.num_bytes and (chunk := _read(response, read_secs)):
            received += len(chunk)
            advance(len(chunk))
            file.write(chunk)
            for digest in hashes:
                digest.update(chunk)
    if received != remote.num_bytes:
        raise FetchError(f"got {received} bytes of {_kind(remote)} that has {remote.num_bytes}")
    for digest, (name, expected) in zip(hashes, remote.checksums, strict=True):
        if digest.hexdigest() != expected:
            raise FetchError(f"got {_kind(remote)} whose {name} is {digest.hexdigest()}, not {expected}")


def refuse_to_replace(folder: pathlib.Path) -> None:
    """Keeps other files that lie where a data set should go.

    Raises:
      FetchError: the folder is there and not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FetchError(f"{folder} is in the way, it holds other files")


def _kind(remote: RemoteFile) -> str:
    return "an archive" if ".tar" in remote.name else "a file"


def _open(url: str, connect_secs: float, read_secs: float):
    """Returns the response to GET; waited for in a thread, because looking up a name has no timeout of its own."""
    opened: futures.Future[Any] = futures.Future()

    def work():
        try:
            opened.set_result(urllib.request.urlopen(url, timeout=read_secs))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return opened.result(connect_secs)
    except (TimeoutError, futures.TimeoutError):  # one class from Python 3.11 on
        raise FetchError(f"no answer within {connect_secs:g} seconds") from None
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(_reason(error)) from None


def _read(response, read_secs: float) -> bytes:
    """The next bytes of the body; none at its end, and none where the connection ends before."""
    try:
        return response.read(_CHUNK_BYTES)
    except TimeoutError:
        raise FetchError(f"no data for {read_secs:g} seconds") from None
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"the connection broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return str(error)
    cause = getattr(error, "reason", error)  # URLError wraps what went wrong
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


@contextlib.contextmanager
def _progress(remote: RemoteFile) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the size of each chunk: a progress bar where somebody watches, else one log line."""
    if not sys.stderr.isatty():
        logging.info("Downloading %s (%.0f MB).", remote.url, remote.num_bytes / 1e6)
        yield lambda num_bytes: None
        return
    from rich import console, progress  # only now: a download is rare and the import is not free

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(remote.name, total=remote.num_bytes)
        yield functools.partial(bar.advance, task)
