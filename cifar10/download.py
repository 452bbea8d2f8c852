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


def download(
    data_dir: str | os.PathLike, archive: remote.RemoteFile = CIFAR10, timeout_secs: float = 15
) -> pathlib.Path:
    """Makes `data_dir`/cifar-10-batches-bin, unless it is there, by downloading and unpacking an archive; returns it.

    Raises DataError for no network, a server that answers late or wrongly, another archive than expected, or a
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
        raise errors.DataError(
            f"CIFAR-10 could not be downloaded from {archive.url}: {failure}. To have it, put its files "
            f"({records.ALL_FILES[0]} to {records.ALL_FILES[-1]}) into {folder}."
        ) from None
    return folder
