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
      names: over images.
      labels: int32 [images].
      class_names: what label i means, in sorted order.
      split: what the split is called: as its folder, or train or test.
      notice: how many files are no images, and other things to be said about the folder; empty if there are none.
      unusable: {name: what is wrong} of what is named like an image and is no file.
    """

    root: pathlib.Path
    names: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    split: str = ""
    notice: str = ""
    unusable: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def paths(self) -> list[bytes]:
        """Returns the images' paths as the file system has them, whatever its encoding."""
        return [os.fsencode(self.root / name) for name in self.names]

    def subset(self, chosen: np.ndarray) -> "Listing":
        """Returns the images at the given indices."""
        return dataclasses.replace(self, names=tuple(self.names[i] for i in chosen), labels=self.labels[chosen])


def kind_of(name: str) -> str:
    """Returns the kind of image that a file's name says it is; an empty string if it says none."""
    return EXTENSIONS.get(os.path.splitext(name)[1].lower(), "")


def fingerprint(listing: Listing, modified: bool = False) -> str:
    """16 hexadecimal digits that follow every name, label and size, and with `modified` the times of change."""
    digest = hashlib.sha256()
    for path, label in zip(listing.paths(), listing.labels, strict=True):
        status = os.stat(path)
        name = os.path.relpath(path, os.fsencode(listing.root))
        digest.update(b"%s\0%d %d %d\n" % (name, label, status.st_size, status.st_mtime_ns if modified else 0))
    return digest.hexdigest()[:16]


def shown(name: str) -> str:
    """Returns a file's name as text, for messages and as a class's name: bytes that are no text become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")
