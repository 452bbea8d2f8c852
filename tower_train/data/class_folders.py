"""Folders of images, one per class: their contents, and their faults."""

import collections
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from tower_train import errors
from tower_train.data.image_listing import EXTENSIONS, Listing, kind_of, shown

TEST_NAMES = ("test", "val", "validation", "valid")
_TO_CONVERT = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl")  # images, not read by TensorFlow


def layout(directory: pathlib.Path) -> str:
    """Draws the expected folders as a tree, to follow a message."""
    return f""" Expected:
  {directory}
  ├── train
  │   ├── cats   (a folder for each class, named like it, with at least two images)
  │   │   ├── 1.jpg
  │   │   └── 2.jpg
  │   └── dogs
  │       └── ...
  └── test       (or val; or no such folder, and --validation_fraction=0.1)
      ├── cats
      └── dogs"""


def _entries(folder: pathlib.Path) -> list[os.DirEntry]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise errors.DataError(f"{folder}: cannot be read: {error.strerror}. Name a folder with --data_dir.") from None


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _class_folders(folder: pathlib.Path, directory: pathlib.Path) -> list[str]:
    """Returns the names of a split's class folders, sorted; DataError if there are fewer than two."""
    entries = _entries(folder)
    names = [entry.name for entry in entries if entry.name[0] != "." and _is_folder(entry)]
    if len(names) > 1:
        return names
    images = sum(kind_of(entry.name) != "" for entry in entries)
    if not names:
        found = f"holds {images} image{'s' * (images > 1)} and no class folders" if images else "holds no folders"
        raise errors.LayoutError(f"{folder}: {found}.{layout(directory)}")
    _check_no_data_set(folder, names)
    raise errors.LayoutError(f"{folder}: holds one class folder only, {shown(names[0])}.{layout(directory)}")


def _check_no_data_set(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Raises DataError if one of these folders in it is a whole data set and no class."""
    for name in names:
        if any((folder / name / split).is_dir() for split in ("train", *TEST_NAMES)):
            there = shown(name)
            raise errors.DataError(
                f"{folder}: holds no images, but {there} in it does. Give --data_dir={folder / there}."
            )


def check_same_classes(train: pathlib.Path, test: pathlib.Path) -> None:
    """Raises DataError for a class that has a folder in one split only."""
    train_classes, test_classes = (_class_folders(folder, train.parent) for folder in (train, test))
    for name in sorted(set(train_classes) ^ set(test_classes)):
        there, missing = (train, test) if name in train_classes else (test, train)
        raise errors.DataError(
            f"{there / shown(name)}: there is no such class in {missing}. Every class needs images in both."
        )


def list_images(folder: pathlib.Path, directory: pathlib.Path, split: str) -> Listing:
    """Lists the images of a split.

    Args:
      folder: the split's folder, which holds the class folders.
      directory: the folder of all splits, for messages.
      split: its name.

    Raises:
      DataError: folders that are not laid out as expected, or cannot be read.
    """
    classes = _class_folders(folder, directory)
    names, labels, unusable, others = [], [], {}, collections.Counter()
    for label, class_name in enumerate(classes):
        entries = _entries(folder / class_name)
        found = [entry.name for entry in entries if _is_image(entry)]
        if not found:
            _check_no_data_set(folder, classes)
            raise errors.LayoutError(
                f"{folder / shown(class_name)}: holds no {', '.join(EXTENSIONS)} file. Add images of this class, or "
                f"move its folder elsewhere.{layout(directory)}"
            )
        names += [os.path.join(class_name, name) for name in found]
        labels += [label] * len(found)
        for entry in entries:
            if _is_image(entry):
                continue
            if kind_of(entry.name) and entry.name[0] != "." and not _is_folder(entry):
                unusable[os.path.join(class_name, entry.name)] = _why_unusable(entry)
            else:
                others[_what_else(entry)] += 1
    labels, shown_classes = np.array(labels, np.int32), tuple(map(shown, classes))
    return Listing(folder, tuple(names), labels, shown_classes, split, _about(folder, others), unusable)


def _is_image(entry: os.DirEntry) -> bool:
    """Returns whether an entry is a file with an image's name; the name is checked first, as that is quicker."""
    try:
        return entry.name[0] != "." and kind_of(entry.name) != "" and entry.is_file()
    except OSError:  # a link to itself
        return False


def _why_unusable(entry: os.DirEntry) -> str:
    try:
        entry.stat()
    except OSError as error:
        return f"is a link that leads nowhere ({error.strerror})"
    return "is a pipe, a socket or a device, not a file"


def _what_else(entry: os.DirEntry) -> str:
    if entry.name[0] == ".":
        return "hidden"
    return "folders" if _is_folder(entry) else os.path.splitext(entry.name)[1].lower() or "without extension"


def _about(folder: pathlib.Path, others: Mapping[str, int]) -> str:
    """Counts the other entries of a split's folder, in words."""
    if not others:
        return ""
    counts = ", ".join(f"{count} {shown(kind)}" for kind, count in sorted(others.items()))
    convert = [kind for kind in sorted(others) if kind in _TO_CONVERT]
    advice = f" To use {' and '.join(convert)}, convert them: `mogrify -format png *{convert[0]}`." if convert else ""
    return f"Passed over in {folder}: {counts}.{advice}"
