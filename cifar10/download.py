"""CIFAR-10 from its home page: downloaded, verified, unpacked, and only then visible under its name."""

import os
import pathlib
import shutil
import tarfile

from cifar10 import records
from tower_train import errors
from tower_train.data import remote

FOLDER = "cifar-10-batches-bin"

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
        with tarfile.open(packed) as members:  # whose checksum is the expected one
            for member in members:
                name = pathlib.PurePosixPath(member.name).name
                if member.isfile() and name in (*records.ALL_FILES, records.CLASS_NAMES_FILE):
                    with members.extractfile(member) as source, open(partial / name, "wb") as target:
                        shutil.copyfileobj(source, target)
        packed.unlink()

    try:
        remote.publish_folder(folder, fill, lambda there: all((there / name).exists() for name in records.ALL_FILES))
    except remote.FetchError as failure:
        raise DownloadError(archive.url, folder, str(failure)) from None
    return folder
