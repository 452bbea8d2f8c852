"""The images of a split: split/class/*.jpg and so on, or labelled otherwise, or a part of class/*.jpg set aside."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re

import numpy as np

from tower_train import errors
from tower_train.data import image_labels
from tower_train.data.image_labels import EXTENSIONS, FOLDERS, readable
from tower_train.examples import TEST, TRAIN, VALIDATION

_TO_CONVERT = (".tif", ".tiff", ".heic", ".avif", ".jp2", ".dcm")  # images of formats that are not read
VALIDATION_NAMES = ("val", "validation", "valid")


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name."""

    root: pathlib.Path  # the folder that names are relative to
    names: tuple[str, ...]  # paths of the images
    labels: np.ndarray  # int32 [images]
    class_names: tuple[str, ...]  # names of labels 0, 1, ..., sorted
    split: str  # its folder's name, or train or validation
    notice: str = ""  # a line on other files in the folders; empty if there are none
    num_all: int = 0  # images in the folder; a part of them may be set aside

    def paths(self) -> list[str]:
        return [os.path.join(self.root, name) for name in self.names]

    def subset(self, indices: np.ndarray) -> "Listing":
        return dataclasses.replace(self, names=tuple(self.names[i] for i in indices), labels=self.labels[indices])

    def fingerprint(self, modified: bool = False) -> str:
        """Returns 16 hexadecimal digits over all names, labels and sizes, and with `modified` the times of change."""
        digest = hashlib.sha256()
        for name, path, label in zip(self.names, self.paths(), self.labels, strict=True):
            status = os.stat(path) if os.path.exists(path) else os.lstat(path)  # of a link to nowhere
            changed = status.st_mtime_ns if modified else 0
            digest.update(b"%s\0%d %d %d\n" % (os.fsencode(name), label, status.st_size, changed))
        return digest.hexdigest()[:16]


def find(
    directory: pathlib.Path,
    split: str,
    validation_fraction: float = 0.0,
    group_pattern: str = "",
    seed: int = 0,
    labels: str = FOLDERS,
) -> Listing | None:
    """Lists the images of a split ('train', 'validation' or 'test'); None if there is no such test or validation split.

    The directory holds `train`, `val` (or `validation`, `valid`) and `test`, each with one folder per class, or the
    class folders themselves, all for training.

    Args:
      validation_fraction: share of the training images to set aside for validation if there is no `val`.
      group_pattern: a regular expression for the group in a file's name (its first bracket, or the whole match), or a
        table, FILE.csv:COLUMN; images of one group stay together. Empty: every image is its own group.
      seed: of the choice.
      labels: 'folders', or the place of the classes of images that lie together, see image_labels.find.

    Raises:
      DataError: no folders, a class without images or in one split only, a name without a group.
      ConfigError: a fraction beside a folder for validation, or a bad pattern.
    """
    train = directory / TRAIN if (directory / TRAIN).is_dir() else directory
    classes, notice = image_labels.find(directory, labels) if labels != FOLDERS else (None, "")

    def listed(folder: pathlib.Path, split: str) -> Listing | None:
        if classes is None:
            return _listed(folder, directory, split)
        return _labelled(folder, train, directory, split, classes, notice, labels)

    folders = {}
    for other, names in ((VALIDATION, VALIDATION_NAMES), (TEST, (TEST,))) if train != directory else ():
        if folder := next((directory / name for name in names if (directory / name).is_dir()), None):
            if classes is None:
                _check_same_classes(train, folder)
            elif not listed(folder, other):
                continue  # its images have no classes
            folders[other] = folder
    if VALIDATION in folders and validation_fraction:
        raise errors.ConfigError(
            f"--validation_fraction={validation_fraction:g}: {folders[VALIDATION]} is there to validate on. Leave the "
            "option out."
        )
    if split in folders:
        return listed(folders[split], folders[split].name)
    if split == TEST or split == VALIDATION and not validation_fraction:
        return None
    listing = listed(train, TRAIN)
    listing = dataclasses.replace(listing, num_all=len(listing.names))
    if train == directory and (whole := _whole(directory)):
        notice = (
            f"{directory} is one of the splits in {whole}. To use them all give --data_dir={whole}. {listing.notice}"
        )
        listing = dataclasses.replace(listing, notice=notice.strip())
    if not validation_fraction:
        return listing
    return _split_off(listing, _groups(listing, directory, group_pattern), split, validation_fraction, seed)


def _whole(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder in which a directory is one of several splits, if it is."""
    splits = {name for name in (TRAIN, TEST, *VALIDATION_NAMES) if (directory.absolute().parent / name).is_dir()}
    return directory.absolute().parent if len(splits) > 1 and directory.absolute().name in splits else None


def _entries(folder: pathlib.Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise errors.DataError(f"{folder}: cannot be read: {error.strerror}. Name a folder with --data_dir.") from None


def _files(folder: pathlib.Path, hidden: collections.Counter) -> list[str]:
    """Returns the files of a class folder and of the folders below it, sorted; counts those that are hidden."""
    names = []

    def refuse(error: OSError) -> None:
        raise errors.DataError(f"{error.filename}: cannot be read: {error.strerror}. Mend or remove it.") from None

    for place, folders, files in os.walk(folder, onerror=refuse):
        seen = [name for name in files if name[0] != "."]
        hidden["hidden"] += len(files) - len(seen) + sum(name[0] == "." for name in folders)
        folders[:] = [name for name in folders if name[0] != "."]
        names += [os.path.relpath(os.path.join(place, name), folder) if place != str(folder) else name for name in seen]
    return sorted(names)


def _class_folders(folder: pathlib.Path, directory: pathlib.Path) -> list[str]:
    """Returns the names of a split's class folders, sorted; DataError if there are fewer than two."""
    entries = _entries(folder)
    names = [name for name in entries if name[0] != "." and os.path.isdir(folder / name)]
    if len(names) > 1:
        return names
    images = sum(name.lower().endswith(EXTENSIONS) for name in entries)
    what = f"holds {len(names)} class folders, and {images} images outside of them; at least two classes are needed"
    raise _layout_error(folder, directory, what)


def _check_same_classes(train: pathlib.Path, test: pathlib.Path) -> None:
    """Raises DataError for a class that has a folder in one split only."""
    train_classes, test_classes = (_class_folders(folder, train.parent) for folder in (train, test))
    for name in sorted(set(train_classes) ^ set(test_classes)):
        there, missing = (train, test) if name in train_classes else (test, train)
        if not any(map(image_labels.is_image, _files(there / name, collections.Counter()))):
            raise errors.DataError(f"{there / readable(name)}: holds no images. Remove it, or give it some.")
        raise errors.DataError(
            f"{there / readable(name)}: there is no such class in {missing}. Every class needs images in both."
        )


def _listed(folder: pathlib.Path, directory: pathlib.Path, split: str) -> Listing:
    """Lists a split's folder; `directory`, the folder of all splits, is for messages."""
    classes = _class_folders(folder, directory)
    names, labels, others, deeper = [], [], collections.Counter(), 0
    for label, class_name in enumerate(classes):
        if any((folder / class_name / split).is_dir() for split in (TRAIN, TEST, *VALIDATION_NAMES)):
            raise _layout_error(folder, directory, "")
        for name in _files(folder / class_name, others):
            extension = os.path.splitext(name)[1].lower()
            if extension in EXTENSIONS:
                names.append(os.path.join(class_name, name))
                labels.append(label)
                deeper += os.sep in name
            else:
                others[extension or "without extension"] += 1
        if labels[-1:] != [label]:
            there = f", but {', '.join(f'{count} {kind}' for kind, count in others.items() if count)}" * any(
                others.values()
            )
            raise _layout_error(
                folder, directory, f"{readable(class_name)} in it holds no {', '.join(EXTENSIONS)} file{there}"
            )
    counts = ", ".join(f"{count} {readable(kind)}" for kind, count in sorted(others.items()) if count)
    notice = f"Passed over in {folder}: {counts}." if counts else ""
    if images := [kind for kind in sorted(others) if kind in _TO_CONVERT]:
        notice += f" To use {' and '.join(images)} files, convert them to PNG."
    if deeper:
        notice += f" {deeper} images are in folders below those of the classes, as of these."
    if table := image_labels.table_in(directory):  # its parts, not its classes, may be what the folders are
        notice += f" {table} beside them gives no classes; if it holds them, give --labels={table}."
    return Listing(
        folder, tuple(names), np.array(labels, np.int32), tuple(map(readable, classes)), split, notice.strip()
    )


def _labelled(
    folder: pathlib.Path,
    train: pathlib.Path,
    directory: pathlib.Path,
    split: str,
    classes: dict[str, str],
    notice: str,
    labels: str,
) -> Listing | None:
    """Lists the images of a split's folder that have a class, one of those in training; None if there are none."""

    def below(folder: pathlib.Path) -> dict[str, str]:
        prefix = "" if folder == directory else folder.name + os.sep
        return {path[len(prefix) :]: name for path, name in classes.items() if path.startswith(prefix)}

    class_names, images = sorted(set(below(train).values())), below(folder)
    if len(class_names) < 2:
        raise errors.DataError(
            f"--labels={labels}: finds images of {len(class_names)} classes below {train}; at least two are needed."
        )
    if unknown := set(images.values()) - set(class_names):
        raise errors.DataError(
            f"{folder}: no image in {train} is of class {min(unknown)}. Every class needs images there."
        )
    numbers_by_name = {name: number for number, name in enumerate(class_names)}
    numbers = np.array([numbers_by_name[name] for name in images.values()], np.int32)
    return Listing(folder, tuple(images), numbers, tuple(class_names), split, notice) if images else None


def _layout_error(folder: pathlib.Path, directory: pathlib.Path, what: str) -> errors.DataError:
    """Returns the error for folders that are not laid out as expected."""
    for name in _entries(folder):
        if any((folder / name / split).is_dir() for split in (TRAIN, TEST, *VALIDATION_NAMES)):
            there = folder / readable(name)
            return errors.DataError(f"{folder}: holds no images, but {there.name} in it does. Give --data_dir={there}.")
    what += f".{image_labels.advice(folder, directory)}"
    return errors.DataError(
        f"{folder}: {what} Expected: {directory}/train/CLASS/*.jpg, with a folder for each class, and the same in "
        f"{directory}/val (or --validation_fraction=0.1) and test, which may be missing."
    )


def _split_off(listing: Listing, groups: list[str], split: str, fraction: float, seed: int) -> Listing:
    """Sets groups aside in a seeded order until they hold the fraction of the images."""

    sizes, aside, count = collections.Counter(groups), set(), 0
    for group in sorted(sizes, key=lambda group: hashlib.sha256(os.fsencode(f"{seed} {group}")).digest()):
        if count < fraction * len(listing.names):
            aside.add(group)
            count += sizes[group]
    is_aside = np.array([group in aside for group in groups])
    for label, class_name in enumerate(listing.class_names):
        sides = set(is_aside[listing.labels == label])
        if len(sides) < 2:
            missing = "to train on" if True in sides else "to validate on"
            raise errors.DataError(
                f"--validation_fraction={fraction:g} leaves no images of class {class_name} {missing}, of "
                f"{len(sizes)} groups. Give another fraction or --seed, or smaller groups with --group_pattern."
            )
    part = listing.subset(np.flatnonzero(is_aside == (split == VALIDATION)))
    return dataclasses.replace(part, split=split, notice=listing.notice if split == TRAIN else "")  # once is enough


def _groups(listing: Listing, directory: pathlib.Path, group_pattern: str) -> list[str]:
    """Returns each image's group."""
    if not group_pattern:
        return list(listing.names)
    if re.search(r"\.csv(:|$)", group_pattern):
        table, _ = image_labels.find(directory, group_pattern, "group_pattern")  # groups where others have classes
        groups = [table.get(os.path.relpath(path, directory)) for path in listing.paths()]
    else:
        try:
            pattern = re.compile(group_pattern)
        except re.error as error:
            raise errors.ConfigError(f"--group_pattern={group_pattern}: no regular expression: {error}.") from None
        matches = [pattern.search(os.path.basename(name)) for name in listing.names]
        groups = [match and match[min(pattern.groups, 1)] for match in matches]
    if None in groups:
        raise errors.DataError(
            f"{listing.root / readable(listing.names[groups.index(None)])}: --group_pattern={group_pattern} finds no "
            "group of it. Give an expression or a table that finds one for every image."
        )
    return groups
