"""Image folders as `Examples`: checked, decoded once if the result fits in memory or on disk, fetched by index."""

import json
import math
import pathlib
import shutil
from concurrent import futures

import numpy as np

from tower_train import errors, files, host
from tower_train.data import arrays, decoding, publish
from tower_train.data.image_files import Listing
from tower_train.data.image_labels import readable
from tower_train.examples import Examples

CACHES = ("auto", "none", "memory", "disk")

_CHUNK = 512  # files that Ctrl-C waits for
_NAMED = 20  # bad files that a message names; it counts the others
_BAD, _PIXELS = "bad.json", "pixels.npy"


def examples(
    listing: Listing, name: str, size: int, channels: int, cache: str = "auto", skip_bad: bool = False
) -> Examples:
    """Makes the examples of a listing, after decoding every file once: uint8 [batch, size, size, channels] images and
    int32 [batch] labels.

    The findings are kept in image_folder of the default data directory (with 'disk' together with the decoded images)
    until a file of the listing changes; 'memory' writes nothing.

    Args:
      name: of the data set, in logs.
      size, channels: images are resized to this height and width, in grayscale (1) or RGB (3).
      cache: place of decoded images, see `place`.
      skip_bad: go on without files that cannot be used, which the examples' notice then names.

    Raises:
      DataError: files that cannot be used, without skip_bad; all of a class, with it; or a cache that does not fit.
    """
    images = _Images(listing.paths(), size, channels)
    cache = place(cache, math.prod(images.shape), host.free_memory() or 0)  # if unknown, auto is none
    if cache == "memory":
        images.pixels = np.empty(images.shape, np.uint8)
        bad = images.decode_all()
    else:
        kind = f"{size}x{channels}" if cache == "disk" else "checked"
        folder = files.data_directory() / "image_folder" / f"{listing.fingerprint(modified=True)}-pillow-{kind}"
        bad = _remembered(images, folder, cache == "disk")
    good = np.setdiff1d(np.arange(len(listing.names)), list(bad))
    left_out = _left_out(listing, bad, good, skip_bad)
    used = listing.subset(good)
    images.used = good
    return Examples(
        name=name,
        num_examples=len(good),
        open=lambda: arrays.fetcher(images, used.labels),
        fingerprint=f"{used.fingerprint()} decoded by Pillow",  # which decides on the pixels
        class_names=listing.class_names,
        notice=" ".join(filter(None, [left_out, listing.notice])) or None,
        labels=used.labels,
    )


class _Images:
    """The images of some files as an array that is read when it is indexed."""

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: list[str], size: int, channels: int):
        self.paths, self.shape = paths, (len(paths), size, size, channels)
        self.pixels = None  # the decoded images [files, size, size, channels]; None: files are decoded when asked for
        self.used = np.arange(len(paths))  # the files that indices count
        self._pool = futures.ThreadPoolExecutor(host.cores())  # Pillow computes without Python's lock

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        files = self.used[indices]
        return np.stack(list(self._pool.map(self._decoded, files))) if self.pixels is None else self.pixels[files]

    def decode_all(self) -> dict[int, str]:
        """Decodes every file, on all cores, and keeps pixels; returns {index: fault} of bad ones."""
        files = range(len(self.paths))
        faults = {}
        for first in files[::_CHUNK]:
            chunk = files[first : first + _CHUNK]
            faults |= zip(chunk, self._pool.map(self._find_fault, chunk), strict=True)
        return {file: fault for file, fault in faults.items() if fault}

    def _find_fault(self, file: int) -> str:
        try:
            image = self._decoded(file)
        except decoding.ImageError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if self.pixels is not None:
            self.pixels[file] = image
        return ""

    def _decoded(self, file: int) -> np.ndarray:
        return decoding.decode(pathlib.Path(self.paths[file]).read_bytes(), *self.shape[1:])


def place(cache: str, num_bytes: int, free_bytes: int) -> str:
    """Chooses the place of decoded images: 'memory', 'disk' or 'none'; 'auto' is memory if they take at most half of
    what is free, and else none. Raises DataError if they do not fit in 'memory'."""
    if cache == "auto":
        return "memory" if num_bytes <= free_bytes / 2 else "none"
    if cache == "memory":
        _check_room(cache, num_bytes, free_bytes, "of memory")
    return cache


def _check_room(cache: str, num_bytes: int, free: float, where: str) -> None:
    if num_bytes > free:
        raise errors.DataError(
            f"--cache={cache}: the decoded images take {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB {where} are "
            "free. Use a smaller --image_size, or --cache=none."
        )


def _remembered(images: _Images, folder: pathlib.Path, with_pixels: bool) -> dict[int, str]:
    """Takes the findings of an earlier run from `folder`, or decodes everything into it; returns faults by index."""

    def fill(partial: pathlib.Path) -> None:
        if with_pixels:
            _check_room("disk", math.prod(images.shape), shutil.disk_usage(partial).free, f"below {folder.parent}")
            images.pixels = np.lib.format.open_memmap(partial / _PIXELS, "w+", np.uint8, images.shape)
        bad = images.decode_all()
        if with_pixels:
            images.pixels.flush()
        (partial / _BAD).write_text(json.dumps(bad))

    try:
        publish.publish_folder(folder, fill, lambda there: (there / _BAD).exists())
        images.pixels = np.load(folder / _PIXELS, mmap_mode="r") if with_pixels else None
        return {int(index): fault for index, fault in json.loads((folder / _BAD).read_text()).items()}
    except OSError as error:
        if not with_pixels:
            return images.decode_all()  # nowhere to remember it
        raise errors.DataError(
            f"--cache=disk: {folder} cannot be written: {error.strerror or error}. Set TOWER_TRAIN_DATA to a directory "
            "that can, or use --cache=memory."
        ) from None


def _left_out(listing: Listing, bad: dict[int, str], good: np.ndarray, skip_bad: bool) -> str:
    """Describes bad files if they may be left out; raises DataError otherwise."""
    if not bad:
        return ""
    faults = [f"{readable(listing.names[index])} {fault}" for index, fault in list(bad.items())[:_NAMED]]
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    summary = f"{len(bad)} of {len(listing.names)} images in {listing.root} cannot be used: {'; '.join(faults)}{more}."
    if not skip_bad:
        raise errors.DataError(f"{summary} Mend or remove them, or add --skip_bad_images to go on without them.")
    for label, class_name in enumerate(listing.class_names):
        if label not in listing.labels[good]:
            raise errors.DataError(f"{summary} No image of class {class_name} is left.")
    return f"Left out: {summary}"
