"""A list of image files with their labels."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping

import numpy as np

EXTENSIONS = {".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG", ".gif": "GIF", ".bmp": "BMP", ".webp": "WebP"}


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name.

    Attributes:
      root: the folder that names are relative to.
      names: paths of the images.
      labels: int32 [images].
      class_names: names of labels 0, 1, ..., sorted.
      split: its folder's name, or train or test.
      notice: remarks for the user on the folder, such as the number of other files; empty if there are none.
      unusable: {name: fault} of entries that are named like images and are no files.
    """

    root: pathlib.Path
    names: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    split: str = ""
    notice: str = ""
    unusable: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def paths(self) -> list[bytes]:
        """Returns the images' paths as bytes of the file system, whatever its encoding."""
        return [os.fsencode(self.root / name) for name in self.names]

    def subset(self, chosen: np.ndarray) -> "Listing":
        """Returns the images at the given indices."""
        return dataclasses.replace(self, names=tuple(self.names[i] for i in chosen), labels=self.labels[chosen])


def kind_of(name: str) -> str:
    """Returns the kind of image by a file's extension; an empty string if it is none."""
    return EXTENSIONS.get(os.path.splitext(name)[1].lower(), "")


def fingerprint(listing: Listing, modified: bool = False) -> str:
    """Returns 16 hexadecimal digits over all names, labels and sizes, and with `modified` the times of change."""
    digest = hashlib.sha256()
    for path, label in zip(listing.paths(), listing.labels, strict=True):
        status = os.stat(path)
        name = os.path.relpath(path, os.fsencode(listing.root))
        digest.update(b"%s\0%d %d %d\n" % (name, label, status.st_size, status.st_mtime_ns if modified else 0))
    return digest.hexdigest()[:16]


def shown(name: str) -> str:
    """Returns a file's name as text, for messages and class names: undecodable bytes become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")
