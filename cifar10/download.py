"""CIFAR-10 from its home page: downloaded, verified, unpacked, and only then visible under its name.

`keras.utils.get_file` was considered and is not used: it opens connections without a timeout, so a silent server holds
the run for ever; it extracts whatever the archive holds, of whatever size, straight into place; and a run killed
meanwhile leaves half a data set that the next one takes for a whole one. What is left is a short loop over `urllib`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import os
import pathlib
import shutil
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from absl import logging

from cifar10 import publish, records
from tower_train import errors

FOLDER = "cifar-10-batches-bin"
_MAX_FILE_BYTES = 64 * 2**20  # twice a file of CIFAR-10: a damaged archive cannot fill the disk
_CHUNK_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Archive:
    """Where an archive is and how it is recognised: its exact size and all of its {hashlib name: hex digest}."""

    url: str
    num_bytes: int
    checksums: tuple[tuple[str, str], ...]


# The MD5 is the home page's; the SHA-256 is what TensorFlow Datasets and others have recorded of the same archive.
CIFAR10 = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    num_bytes=170_052_171,
    checksums=(
        ("md5", "c32a1d4ab5d03f1284b67883e8d87530"),
        ("sha256", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
)


class DownloadError(errors.DataError):
    """CIFAR-10 could not be had from the network; `reason` is the sentence that says why, without the advice."""

    def __init__(self, url: str, folder: pathlib.Path, why: str):
        self.reason = f"CIFAR-10 could not be downloaded from {url}: {why}."
        super().__init__(
            f"{self.reason} Put its files ({records.ALL_FILES[0]} to "
            f"{records.ALL_FILES[-1]}) into {folder}, or train on drawn images with --dataset=generated."
        )


def download(
    data_dir: str | os.PathLike, archive: Archive = CIFAR10, connect_secs: float = 10, read_secs: float = 15
) -> pathlib.Path:
    """Makes `data_dir`/cifar-10-batches-bin, unless it is there, by downloading and unpacking an archive.

    A progress bar is shown where stderr is a terminal. The folder appears whole or not at all; processes that want the
    same one take turns, and what a killed one left behind is removed by the next.

    Args:
      data_dir: made where missing.
      archive: what to download.
      connect_secs: how long looking up the name, connecting and the first answer may take together.
      read_secs: how long the server may then be silent.

    Returns:
      The folder with the .bin files.

    Raises:
      DownloadError: no network, a server that answers late or wrongly, an archive that is not the expected one, or a
        `data_dir` that cannot be written to.
    """
    folder = pathlib.Path(data_dir, FOLDER)

    def fill(partial: pathlib.Path) -> None:
        packed = partial / "archive.tar.gz"
        _fetch(archive, packed, connect_secs, read_secs)
        _unpack(packed, partial)
        packed.unlink()

    try:
        publish.publish_folder(folder, fill, _is_complete)
    except _Failure as failure:
        raise DownloadError(archive.url, folder, str(failure)) from None
    except OSError as error:
        raise DownloadError(archive.url, folder, f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


class _Failure(Exception):
    """Why a download ended, in words for the user."""


def _is_complete(folder: pathlib.Path) -> bool:
    if all((folder / name).exists() for name in records.ALL_FILES):
        return True
    if folder.exists() and any(folder.iterdir()):
        raise _Failure(f"{folder} is in the way, it holds other files")
    return False


def _fetch(archive: Archive, path: pathlib.Path, connect_secs: float, read_secs: float) -> None:
    """Downloads the archive to `path` and verifies it."""
    hashes = [hashlib.new(name, usedforsecurity=False) for name, _ in archive.checksums]
    received = 0
    response = _open(archive.url, connect_secs, read_secs)
    with contextlib.closing(response), open(path, "wb") as file, _progress(archive) as advance:
        while received <= archive.num_bytes and (chunk := _read(response, read_secs)):
            received += len(chunk)
            advance(len(chunk))
            file.write(chunk)
            for digest in hashes:
                digest.update(chunk)
    if received != archive.num_bytes:
        raise _Failure(f"got {received} bytes of an archive that has {archive.num_bytes}")
    for digest, (name, expected) in zip(hashes, archive.checksums, strict=True):
        if digest.hexdigest() != expected:
            raise _Failure(f"got an archive whose {name} is {digest.hexdigest()}, not {expected}")


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
        raise _Failure(f"no answer within {connect_secs:g} seconds") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Failure(_reason(error)) from None


def _read(response, read_secs: float) -> bytes:
    """The next bytes of the body; none at its end, and none where the connection ends before."""
    try:
        return response.read(_CHUNK_BYTES)
    except TimeoutError:
        raise _Failure(f"no data for {read_secs:g} seconds") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Failure(f"the connection broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return str(error)
    cause = getattr(error, "reason", error)  # URLError wraps what went wrong
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


@contextlib.contextmanager
def _progress(archive: Archive) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the size of each chunk: a progress bar where somebody watches, else one log line."""
    if not sys.stderr.isatty():
        logging.info("Downloading %s (%.0f MB).", archive.url, archive.num_bytes / 1e6)
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
        task = bar.add_task(archive.url.rpartition("/")[2], total=archive.num_bytes)
        yield functools.partial(bar.advance, task)


def _unpack(packed: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the data set's files out of the archive into `folder`, by name; nothing else in it is ever written."""
    wanted = {f"{FOLDER}/{name}": name for name in (*records.ALL_FILES, records.CLASS_NAMES_FILE)}
    try:
        with tarfile.open(packed, "r|gz") as members:
            for member in members:
                if name := wanted.pop(member.name.removeprefix("./"), None):
                    _copy_member(members, member, folder / name)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise _Failure(f"not a .tar.gz archive that can be read: {error}") from None
    if wanted:
        raise _Failure(f"the archive lacks {', '.join(wanted)}")


def _copy_member(members: tarfile.TarFile, member: tarfile.TarInfo, path: pathlib.Path) -> None:
    if not member.isfile() or member.size > _MAX_FILE_BYTES:
        raise _Failure(f"{member.name} in the archive is not a file of at most {_MAX_FILE_BYTES} bytes")
    with members.extractfile(member) as source, open(path, "xb") as target:
        shutil.copyfileobj(source, target)
