"""CIFAR-10 from its home page: downloaded, verified, unpacked, and only then visible under its name.

Only the data set's own files are written from the archive, by name and up to a size.
"""

import os
import pathlib
import shutil
import tarfile
import zlib

from cifar10 import records
from tower_train import errors
from tower_train.data import remote

FOLDER = "cifar-10-batches-bin"
_MAX_FILE_BYTES = 64 * 2**20  # twice a file of CIFAR-10: a damaged archive cannot fill the disk

# The checksum is from TensorFlow Datasets and others, for the archive whose MD5 is on the home page.
CIFAR10 = remote.RemoteFile(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    num_bytes=170_052_171,
    checksum=("sha256", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
)


class DownloadError(errors.DataError):
    """A failed download of CIFAR-10; `reason` is the sentence with the cause, without the advice."""

    def __init__(self, url: str, folder: pathlib.Path, why: str):
        self.reason = f"CIFAR-10 could not be downloaded from {url}: {why}."
        super().__init__(
            f"{self.reason} Put its files ({records.ALL_FILES[0]} to "
            f"{records.ALL_FILES[-1]}) into {folder}, or train on drawn images with --dataset=generated."
        )


def download(
    data_dir: str | os.PathLike, archive: remote.RemoteFile = CIFAR10, timeout_secs: float = 15
) -> pathlib.Path:
    """Makes `data_dir`/cifar-10-batches-bin, unless it is there, by downloading and unpacking an archive; returns it.

    Arguments are those of `remote.fetch`; `data_dir` is made if missing.

    Raises:
      DownloadError: no network, a server that answers late or wrongly, an archive that is not the expected one, or a
        `data_dir` that cannot be written to.
    """
    folder = pathlib.Path(data_dir, FOLDER)

    def fill(partial: pathlib.Path) -> None:
        packed = partial / "archive.tar.gz"
        remote.fetch(archive, packed, timeout_secs)
        unpack(packed, partial)
        packed.unlink()

    try:
        remote.publish_folder(folder, fill, lambda there: all((there / name).exists() for name in records.ALL_FILES))
    except remote.FetchError as failure:
        raise DownloadError(archive.url, folder, str(failure)) from None
    return folder


def unpack(packed: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the data set's files, and nothing else, out of the archive into `folder`; FetchError if it lacks any."""
    wanted = {f"{FOLDER}/{name}": name for name in (*records.ALL_FILES, records.CLASS_NAMES_FILE)}
    try:
        with tarfile.open(packed, "r|gz") as members:
            for member in members:
                if not (name := wanted.pop(member.name.removeprefix("./"), None)):
                    continue
                if not member.isfile() or member.size > _MAX_FILE_BYTES:
                    limit = f"a file of at most {_MAX_FILE_BYTES} bytes"
                    raise remote.FetchError(f"{member.name} in the archive is not {limit}")
                with members.extractfile(member) as source, open(folder / name, "xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise remote.FetchError(f"not a .tar.gz archive that can be read: {error}") from None
    if wanted:
        raise remote.FetchError(f"the archive lacks {', '.join(wanted)}")
