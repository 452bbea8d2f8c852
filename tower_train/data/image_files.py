"""The images of a split: split/class/*.jpg and so on, or a part of class/*.jpg set aside."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re

import numpy as np

from tower_train import errors
from tower_train.data import class_folders
from tower_train.data.class_folders import TEST_NAMES
from tower_train.data.image_listing import Listing, shown


def find(
    directory: pathlib.Path, split: str, validation_fraction: float = 0.0, group_pattern: str = "", seed: int = 0
) -> Listing:
    """Lists the images of a split.

    The directory holds `train` and `test` (or `val`, `validation`, `valid`), each with one folder per class. Without a
    second split, or with class folders directly in it, a fraction of the groups of images is set aside for testing.

    Args:
      directory: the folder of the splits.
      split: 'train' or 'test'.
      validation_fraction: share of the images to set aside; 0 for none.
      group_pattern: a regular expression for the group in a file's name (its first bracket, or the whole match); images
        of one group stay together. Empty: every image is its own group.
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
        class_folders.check_same_classes(train, tests[0])
        if split == "test":
            return class_folders.list_images(tests[0], directory, tests[0].name)
    everything = _with_enough(class_folders.list_images(train, directory, "train"), directory, validation_fraction)
    if validation_fraction:
        return _split_off(everything, split, validation_fraction, group_pattern, seed)
    if directory.name == "train" and train == directory and (beside := _beside(directory)):
        everything = _noted(everything, f"Images to test on are in {beside}: --data_dir={directory.parent} has both.")
    if split == "test":
        raise errors.ConfigError(
            f"{directory}: holds no images to test on: {_missing_test(directory, train)}, or train with "
            "--validation_fraction=0.1, which sets a tenth of the images aside."
        )
    return everything


def _missing_test(directory: pathlib.Path, train: pathlib.Path) -> str:
    """Names the missing folder and the remedy."""
    if train != directory:
        return f"there is no folder {' or '.join(TEST_NAMES)} beside train. Add one"
    if beside := _beside(directory):
        renaming = "" if directory.name == "train" else f"rename {directory.name} to train and "
        return f"they are in {beside}, beside it. To test on them {renaming}give --data_dir={directory.parent}"
    return "it holds class folders, and not the folders train and test of them. Move them there"


def _beside(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of test images beside another one, if there is one."""
    return next((path for name in TEST_NAMES if (path := folder.parent / name).is_dir()), None)


def _noted(listing: Listing, note: str) -> Listing:
    return dataclasses.replace(listing, notice=" ".join(filter(None, [listing.notice, note])))


def _with_enough(listing: Listing, directory: pathlib.Path, validation_fraction: float) -> Listing:
    """Notes classes with a single training image; refuses them if all are so, or if images are to be set aside."""
    lonely = [listing.class_names[i] for i in np.flatnonzero(np.bincount(listing.labels) == 1)]
    layout = class_folders.layout(directory)
    if len(lonely) == len(listing.class_names):
        found = f"each of its {len(lonely)} class folders holds one image only"
        raise errors.LayoutError(f"{listing.root}: {found}.{layout}")
    if lonely and validation_fraction:
        raise errors.LayoutError(
            f"--validation_fraction={validation_fraction:g}: {listing.root / lonely[0]} holds one image only, which "
            f"cannot be both trained on and tested on.{layout}"
        )
    return _noted(listing, f"Only one image to train on of class {', '.join(lonely)}." if lonely else "")


def _split_off(listing: Listing, split: str, fraction: float, group_pattern: str, seed: int) -> Listing:
    """Sets groups aside in a seeded order until they hold the fraction of the images."""
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
    return dataclasses.replace(listing.subset(np.flatnonzero(in_test == (split == "test"))), split=split)


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
                f"{listing.root / shown(name)}: --group_pattern={group_pattern} finds no group in this name. "
                "Give an expression that finds one in every name."
            )
        groups.append(match[1] if pattern.groups else match[0])
    return groups
