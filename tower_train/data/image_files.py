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

# {name of a folder: its split}
_SPLITS = {TRAIN: TRAIN, "val": VALIDATION, "validation": VALIDATION, "valid": VALIDATION, TEST: TEST}


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name."""

    root: pathlib.Path  # the folder that names are relative to
    names: tuple[str, ...]  # paths of the images
    labels: np.ndarray  # int32 [images]
    class_names: tuple[str, ...]  # names of labels 0, 1, ..., sorted
    split: str  # its folder's name, or train or validation
    notice: str  # a line on other files in the folders; empty if there are none

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
      DataError: no folders, a class without images, or in one split only, a name without a group.
      ConfigError: a fraction beside a folder for validation, or a bad pattern.
    """
    folders = {TRAIN: directory}
    if (directory / TRAIN).is_dir():
        # of several folders for validation the first
        folders |= {_SPLITS[name]: directory / name for name in reversed(_SPLITS) if (directory / name).is_dir()}
    listings = _by_folder(folders, directory) if labels == FOLDERS else _by_label(folders, directory, labels)
    if VALIDATION in listings and validation_fraction:
        raise errors.ConfigError(
            f"--validation_fraction={validation_fraction:g}: {folders[VALIDATION]} is there to validate on. Leave the "
            "option out."
        )
    if split == TEST or not validation_fraction:
        return listings.get(split)
    groups = _groups(listings[TRAIN], directory, group_pattern)
    return _split_off(listings[TRAIN], groups, split, validation_fraction, seed)


def _entries(folder: pathlib.Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise errors.DataError(f"{folder}: cannot be read: {error.strerror}. Name a folder with --data_dir.") from None


def _files(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the images in a class folder and the folders below it, sorted, and the other files; hidden ones are
    neither."""
    images, others = [], []

    def refuse(error: OSError) -> None:
        raise errors.DataError(f"{error.filename}: cannot be read: {error.strerror}. Mend or remove it.") from None

    for place, folders, files in os.walk(folder, onerror=refuse):
        below = place.removeprefix(str(folder)).lstrip(os.sep)
        for name in files:
            if name[0] != ".":
                (images if image_labels.is_image(name) else others).append(os.path.join(below, name))
        folders[:] = [name for name in folders if name[0] != "."]
    return sorted(images), sorted(others)


def _class_folders(folder: pathlib.Path, directory: pathlib.Path) -> list[str]:
    """Returns the names of a split's class folders, sorted; DataError if there are fewer than two."""
    entries = _entries(folder)
    names = [name for name in entries if name[0] != "." and os.path.isdir(folder / name)]
    if len(names) > 1:
        return names
    images = sum(name.lower().endswith(EXTENSIONS) for name in entries)
    what = f"holds {len(names)} class folders, and {images} images outside of them; at least two classes are needed"
    raise _layout_error(folder, directory, what)


def _by_folder(folders: dict[str, pathlib.Path], directory: pathlib.Path) -> dict[str, Listing]:
    """Lists the images of each split by its class folders; DataError for a class in one split only."""
    listings = {split: _in_class_folders(folder, directory) for split, folder in folders.items()}
    train = listings[TRAIN]
    for other in listings.values():
        for name in sorted(set(train.class_names) ^ set(other.class_names)):
            there, missing = (train, other) if name in train.class_names else (other, train)
            raise errors.DataError(
                f"{there.root / name}: there is no such class in {missing.root}. Every class needs images in both."
            )
    return listings


def _in_class_folders(folder: pathlib.Path, directory: pathlib.Path) -> Listing:
    """Lists a split's folder; `directory`, the folder of all splits, is for messages."""
    classes, images, others = _class_folders(folder, directory), {}, []
    for class_name in classes:
        if any((folder / class_name / split).is_dir() for split in _SPLITS):
            raise _layout_error(folder, directory, "")
        names, passed_over = _files(folder / class_name)
        if not names:
            what = f"{readable(class_name)} in it holds no {', '.join(EXTENSIONS)} file; remove it, or give it some"
            raise _layout_error(folder, directory, what)
        images |= dict.fromkeys((os.path.join(class_name, name) for name in names), class_name)
        others += [os.path.join(class_name, name) for name in passed_over]
    such = f"{len(others)} files that are no images, such as {readable(others[0])}" if others else ""
    notice = f"Passed over in {folder}: {such}." if others else ""
    if table := image_labels.table_in(directory):  # its parts, not its classes, may be what the folders are
        notice += f" {table} beside them gives no classes; if it holds them, give --labels={table}."
    listing = _listing(folder, directory, images, classes, notice.strip())
    return dataclasses.replace(listing, class_names=tuple(map(readable, classes)))


def _by_label(folders: dict[str, pathlib.Path], directory: pathlib.Path, labels: str) -> dict[str, Listing]:
    """Lists the images of each split that have a class, one of those in training; leaves out a split without any."""
    classes, notice = image_labels.find(directory, labels)
    listings, class_names, train = {}, [], folders[TRAIN]
    for split, folder in folders.items():  # train comes first
        prefix = "" if folder == directory else folder.name + os.sep
        images = {path[len(prefix) :]: name for path, name in classes.items() if path.startswith(prefix)}
        class_names = class_names or sorted(set(images.values()))
        if len(class_names) < 2:
            raise errors.DataError(
                f"--labels={labels}: finds images of {len(class_names)} classes below {train}; at least two are needed."
            )
        if unknown := set(images.values()) - set(class_names):
            raise errors.DataError(
                f"{folder}: no image in {train} is of class {min(unknown)}. Every class needs images there."
            )
        if images:
            listings[split] = _listing(folder, directory, images, class_names, notice)
    return listings


def _listing(
    folder: pathlib.Path, directory: pathlib.Path, images: dict[str, str], class_names: list[str], notice: str
) -> Listing:
    """Makes the listing of a split's folder, from {path of an image: its class} and all classes, sorted."""
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = np.array([numbers[name] for name in images.values()], np.int32)
    split = TRAIN if folder == directory else folder.name
    return Listing(folder, tuple(images), labels, tuple(class_names), split, notice)


def _layout_error(folder: pathlib.Path, directory: pathlib.Path, what: str) -> errors.DataError:
    """Returns the error for folders that are not laid out as expected."""
    for name in _entries(folder):
        if any((folder / name / split).is_dir() for split in _SPLITS):
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
