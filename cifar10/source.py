"""The images of a run: --dataset=auto, cifar10 or generated, and --data_dir; CIFAR-10 is downloaded if missing."""

import dataclasses
import functools
import os
import pathlib
import shutil
import tarfile

from cifar10 import generated, records
from tower_train import errors, files, workload
from tower_train.data import remote

DATASETS = ("auto", "cifar10", "generated")
FOLDER = "cifar-10-batches-bin"
# The checksum is from TensorFlow Datasets and others, for the archive whose MD5 is on the home page.
CIFAR10 = remote.RemoteFile(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    checksum="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)

_AUTO_TIMEOUT_SECS = 5  # short: the run can also train on drawn images


def examples(request: workload.DataRequest) -> workload.Examples:
    """Reads the images of a split, after downloading or drawing them if necessary.

    `cifar10` is CIFAR-10, downloaded if it is missing. `generated` is the drawn stand-in, made if it is missing. `auto`
    is CIFAR-10 if it is there or can be downloaded, else the stand-in; in a directory that the user named, only what is
    there. CIFAR-10 may be in the directory itself or, as its archive unpacks, in `cifar-10-batches-bin` in it.
    The stand-in ignores `request.seed`, and says in its `notice` that it is not CIFAR-10. Raises DataError for images
    that are unavailable, incomplete or damaged.
    """
    folder, why_drawn = locate(request)
    if why_drawn:
        what = f"drawn images ({', '.join(generated.CLASS_NAMES)})"
        notice = f"NOT CIFAR-10: these are {what}, {why_drawn} Precision on them says nothing about CIFAR-10."
        drawn = records.examples(folder, request.split, "generated")
        return dataclasses.replace(drawn, dataset="generated", notice=notice)
    # Other images in the same format are named after their folder.
    name = "CIFAR-10" if records.class_names(folder) == records.CLASS_NAMES else str(folder)
    return dataclasses.replace(records.examples(folder, request.split, name), dataset="cifar10")


def locate(request: workload.DataRequest) -> tuple[pathlib.Path, str]:
    """Returns the folder of the .bin files, and the reason for drawn images or ''. Raises DataError like `examples`."""
    directory = files.data_directory(request.data_dir)
    if request.dataset == "generated":
        return generated.generate(directory), "as --dataset=generated asks."
    if folder := find_cifar10(directory):
        return folder, ""
    if request.dataset == "cifar10":
        return download(directory), ""
    if request.data_dir is not None:
        raise errors.DataError(
            f"--data_dir={request.data_dir}: neither it nor {FOLDER} in it holds {records.ALL_FILES[0]} to "
            f"{records.ALL_FILES[-1]}. Name the directory that does, or add --dataset=cifar10 to download CIFAR-10 "
            "into it, or --dataset=generated to train on drawn images."
        )
    if failure := _download_failure(directory):
        return generated.generate(directory), f"because {failure}"
    return directory / FOLDER, ""


def find_cifar10(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns `directory` or `cifar-10-batches-bin` in it, if one of them holds CIFAR-10; DataError if it is
    incomplete."""
    for folder in (directory, directory / FOLDER):
        missing = [name for name in records.ALL_FILES if not os.path.exists(folder / name)]
        if not missing:
            return folder
        if len(missing) < len(records.ALL_FILES):
            raise errors.DataError(
                f"{folder}: CIFAR-10 is incomplete, {', '.join(missing)} missing. Add what is missing, or remove the "
                "rest so that the data set can be downloaded whole."
            )
    return None


@functools.cache  # so that training and evaluation wait for the network once
def _download_failure(directory: pathlib.Path) -> str | None:
    """Downloads CIFAR-10; returns the reason of a failure, or None."""
    try:
        download(directory, timeout_secs=_AUTO_TIMEOUT_SECS)
    except errors.DataError as error:
        return str(error)
    return None


def download(
    data_dir: str | os.PathLike, archive: remote.RemoteFile = CIFAR10, timeout_secs: float = 15
) -> pathlib.Path:
    """Downloads, verifies and unpacks an archive into `data_dir`/cifar-10-batches-bin, unless that exists; returns it.
    Raises DataError if there is no network, the server answers late or wrongly, the archive is not the expected one, or
    `data_dir` cannot be written to."""
    folder = pathlib.Path(data_dir, FOLDER)

    def fill(partial: pathlib.Path) -> None:
        remote.fetch(archive, partial, timeout_secs)
        packed = partial / archive.name
        with tarfile.open(packed) as members:  # its checksum has been verified
            for member in members:
                name = pathlib.PurePosixPath(member.name).name
                if member.isfile() and name in (*records.ALL_FILES, records.CLASS_NAMES_FILE):
                    with members.extractfile(member) as source, open(partial / name, "wb") as target:
                        shutil.copyfileobj(source, target)
        packed.unlink()

    def is_complete(there: pathlib.Path) -> bool:
        return all((there / name).exists() for name in records.ALL_FILES)

    advice = f"To have it, put its files ({records.ALL_FILES[0]} to {records.ALL_FILES[-1]}) into {folder}."
    return remote.publish_folder("CIFAR-10", folder, fill, is_complete, advice)
