"""The images that a folder holds: split/class/*.jpeg, *.jpg, *.png, labels from the names of the class folders."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re

import numpy as np

from tower_train import errors

EXTENSIONS = {".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG"}
TEST_NAMES = ("test", "val", "validation", "valid")


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name.

    Attributes:
      root: the folder that names are relative to.
      names: over images.
      labels: int32 [images].
      class_names: what label i means, in sorted order.
      passed_over: how many files are no images, in words; empty if there are none.
    """

    root: pathlib.Path
    names: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    passed_over: str = ""

    def paths(self) -> list[bytes]:
        """Returns the images' paths as the file system has them, whatever its encoding."""
        return [os.fsencode(self.root / name) for name in self.names]

    def subset(self, chosen: np.ndarray) -> "Listing":
        """Returns the images at the given indices."""
        return dataclasses.replace(self, names=tuple(self.names[i] for i in chosen), labels=self.labels[chosen])


def find(
    directory: pathlib.Path, split: str, validation_fraction: float = 0.0, group_pattern: str = "", seed: int = 0
) -> Listing:
    """Lists the images of a split.

    The directory holds `train` and `test` (or `val`, `validation`, `valid`), each with one folder a class. If there is
    no second split, or there are class folders at once, a fraction of the groups of images is split off for testing.

    Args:
      directory: where the folders are.
      split: 'train' or 'test'.
      validation_fraction: of the images, to be split off; 0 for none.
      group_pattern: a regular expression that finds in a file's name what its group is called (its first bracket, or
        all that it matches); images of one group stay together. Empty: every image is its own group.
      seed: of the choice.

    Raises:
      DataError: no folders, a class without images or in one split only, a name without a group.
      ConfigError: a fraction beside a second split, none where it is needed, or a bad pattern.
    """
    train = directory / "train" if (directory / "train").is_dir() else directory
    tests = [directory / name for name in TEST_NAMES if (directory / name).is_dir()] if train != directory else []
    if tests:
        if validation_fraction:
            raise errors.ConfigError(
                f"--validation_fraction={validation_fraction:g}: {tests[0]} is there to test on. Leave the option out."
            )
        _check_same_classes(train, tests[0])
        return _list(train if split == "train" else tests[0])
    everything = _list(train)
    if validation_fraction:
        return _split_off(everything, split, validation_fraction, group_pattern, seed)
    if split == "test":
        raise errors.ConfigError(
            f"{directory} holds no images to test on: there is no folder {' or '.join(TEST_NAMES)} beside train. "
            "--validation_fraction=0.1 sets a tenth of the images aside."
        )
    return everything


def fingerprint(listing: Listing, modified: bool = False) -> str:
    """16 hexadecimal digits that follow every name, label and size, and with `modified` the times of change."""
    digest = hashlib.sha256()
    for path, label in zip(listing.paths(), listing.labels, strict=True):
        status = os.stat(path)
        name = os.path.relpath(path, os.fsencode(listing.root))
        digest.update(b"%s\0%d %d %d\n" % (name, label, status.st_size, status.st_mtime_ns if modified else 0))
    return digest.hexdigest()[:16]


def shown(name: str) -> str:
    """Returns a file's name for a message, also if it is not valid in the file system's encoding."""
    return os.fsencode(name).decode(errors="replace")


def _class_folders(folder: pathlib.Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise errors.DataError(f"{folder}: cannot be read: {error.strerror}. Name a folder with --data_dir.") from None
    if not names:
        raise errors.DataError(
            f"{folder}: holds no folders; expected one a class, with {', '.join(EXTENSIONS)} files in each."
        )
    return names


def _check_same_classes(train: pathlib.Path, test: pathlib.Path) -> None:
    train_classes, test_classes = _class_folders(train), _class_folders(test)
    for name in sorted(set(train_classes) ^ set(test_classes)):
        there, missing = (train, test) if name in train_classes else (test, train)
        raise errors.DataError(
            f"{there / shown(name)}: there is no such class in {missing}. Every class needs images in both."
        )


def _list(folder: pathlib.Path) -> Listing:
    classes = _class_folders(folder)
    names, labels, others = [], [], collections.Counter()
    for label, class_name in enumerate(classes):
        found = []
        for entry in os.scandir(folder / class_name):
            extension = os.path.splitext(entry.name)[1].lower()
            if entry.name[0] == ".":
                others["hidden"] += 1
            elif entry.is_file() and extension in EXTENSIONS:
                found.append(entry.name)
            else:
                others["folders" if entry.is_dir() else extension or "without extension"] += 1
        if not found:
            raise errors.DataError(
                f"{folder / shown(class_name)}: holds no {', '.join(EXTENSIONS)} file. Add images of this class, or "
                "remove its folder."
            )
        names += [os.path.join(class_name, name) for name in sorted(found)]
        labels += [label] * len(found)
    passed_over = ", ".join(f"{count} {shown(kind)}" for kind, count in sorted(others.items()))
    return Listing(
        folder, tuple(names), np.array(labels, np.int32), tuple(map(shown, classes)),
        passed_over and f"Passed over in {folder}: {passed_over}.",
    )  # fmt: skip


def _split_off(listing: Listing, split: str, fraction: float, group_pattern: str, seed: int) -> Listing:
    """Groups in an order that the seed gives are set aside until they hold the fraction of the images."""
    groups = _groups(listing, group_pattern)

    def place(group: str) -> bytes:
        return hashlib.sha256(os.fsencode(f"{seed} {group}")).digest()

    wanted, aside, count = fraction * len(listing.names), set(), 0
    sizes = collections.Counter(groups)
    for group in sorted(sizes, key=place):
        if count >= wanted:
            break
        aside.add(group)
        count += sizes[group]
    in_test = np.array([group in aside for group in groups])
    for label, class_name in enumerate(listing.class_names):
        if len(set(in_test[listing.labels == label])) < 2:
            missing = "to train on" if in_test[listing.labels == label].all() else "to test on"
            raise errors.DataError(
                f"--validation_fraction={fraction:g} leaves no images of class {class_name} {missing}, of "
                f"{len(sizes)} groups. Give another fraction or --seed, or smaller groups with --group_pattern."
            )
    return listing.subset(np.flatnonzero(in_test == (split == "test")))


def _groups(listing: Listing, group_pattern: str) -> list[str]:
    """Returns each image's group."""
    if not group_pattern:
        return list(listing.names)
    try:
        pattern = re.compile(group_pattern)
    except re.error as error:
        raise errors.ConfigError(f"--group_pattern={group_pattern}: no regular expression: {error}.") from None
    groups = []
    for name in listing.names:
        match = pattern.search(os.path.basename(name))
        if not match:
            raise errors.DataError(
                f"{listing.root / shown(name)}: --group_pattern={group_pattern} finds no group in this name. Give an "
                "expression that finds one in every name."
            )
        groups.append(match[1] if pattern.groups else match[0])
    return groups
