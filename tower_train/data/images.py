"""Image folders as `Examples`: checked, decoded once if the result fits in memory or on disk, fetched by index."""

import hashlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.data import arrays, decoding, image_check, image_listing, publish
from tower_train.data.directories import default_directory
from tower_train.data.image_check import Checked
from tower_train.data.image_listing import Listing
from tower_train.examples import Examples

CACHES = ("auto", "none", "memory", "disk")

_NAMED = 20  # bad files that a message names; it counts the others
_BAD, _FILES, _PIXELS = "bad.json", "files.npz", "pixels.npy"


def examples(
    listing: Listing,
    name: str,
    size: int,
    channels: int,
    cache: str = "auto",
    skip_bad: bool = False,
    cache_dir: pathlib.Path | None = None,
) -> Examples:
    """Makes the examples of a listing, after decoding every file once.

    The findings are kept in `cache_dir` (with 'disk' together with the decoded images) until a file of the listing
    changes; 'memory' writes nothing.

    Args:
      listing: from image_files.find.
      name: name of the data set in logs.
      size: height and width that images are resized to.
      channels: 1 for grayscale, 3 for RGB.
      cache: place of decoded images: 'memory', 'disk', 'none', or 'auto', which is memory if they take at most half of
        what is free, and else none.
      skip_bad: go on without files that cannot be used, instead of raising.
      cache_dir: None for image_folder in the default data directory.

    Returns:
      Examples whose `fetch` gives uint8 [batch, size, size, channels] images and int32 [batch] labels; their `notice`
        names what was left out.

    Raises:
      DataError: files that cannot be used, without skip_bad; all of a class, with it; or a cache that does not fit.
    """
    cache_dir = cache_dir or default_directory() / "image_folder"
    shape = (len(listing.names), size, size, channels)
    cache = place(cache, math.prod(shape), host.free_memory() or 0)  # if unknown, auto is none
    pixels = None
    if cache == "memory":
        pixels = np.empty(shape, np.uint8)
        checked = image_check.check(listing, size, channels, pixels)
    else:
        kind = f"{size}x{channels}" if cache == "disk" else f"checked{channels}"
        folder = cache_dir / f"{image_listing.fingerprint(listing, modified=True)}-{kind}"
        checked = _remembered(listing, size, channels, folder, cache == "disk")
        pixels = np.load(folder / _PIXELS, mmap_mode="r") if cache == "disk" else None
    good = np.setdiff1d(np.arange(len(listing.names)), list(checked.bad))
    left_out = _left_out(listing, checked.bad, good, skip_bad)
    used = listing.subset(good)
    orientations = checked.orientations[good]
    fetched = [np.array(used.paths()), checked.digests[good]] if pixels is None else [good]
    if pixels is None and (orientations > 1).any():
        fetched.append(orientations.astype(np.int64))
    return Examples(
        name=name,
        num_examples=len(good),
        open=lambda: _fetcher(arrays.fetcher(*fetched, used.labels), pixels, size, channels),
        fingerprint=_fingerprint(used, orientations),
        class_names=listing.class_names,
        notice=" ".join(filter(None, [left_out, listing.notice])) or None,
        parallel_steps=None if pixels is not None else host.cores(),
        labels=used.labels,
    )


def _fingerprint(used: Listing, orientations: np.ndarray) -> str:
    """Hashes the files, and their orientations if any is turned."""
    of_files = image_listing.fingerprint(used)
    if (orientations == 1).all():
        return of_files
    return hashlib.sha256(of_files.encode() + orientations.tobytes()).hexdigest()[:16]


def _fetcher(by_index: Callable, pixels: np.ndarray | None, size: int, channels: int) -> Callable:
    """Makes `fetch`; by_index gives rows of `pixels`, or paths, digests and any orientations of files, and then
    labels."""

    def decode(file: tuple[tf.Tensor, ...]) -> tf.Tensor:
        path, digest, *orientation = file
        contents = tf.io.read_file(path)
        is_same = tf.equal(decoding.digest(contents), digest)
        about = [path, "is not what it was when the run began"]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=is_same, data=about)]):
            image = decoding.decode(tf.identity(contents), channels)
        return decoding.resized(image, size, size, *orientation)

    def fetch(indices: tf.Tensor):
        *found, labels = by_index(indices)
        if pixels is None:
            return tf.map_fn(decode, tuple(found), fn_output_signature=tf.uint8), labels
        return *arrays.fetcher(pixels)(*found), labels

    return fetch


def place(cache: str, num_bytes: int, free_bytes: int) -> str:
    """Chooses the place of decoded images: 'memory', 'disk' or 'none'; DataError if they do not fit in 'memory'."""
    if cache == "auto":
        return "memory" if num_bytes <= free_bytes / 2 else "none"
    if cache == "memory" and num_bytes > free_bytes:
        raise _does_not_fit(cache, num_bytes, free_bytes, "of memory")
    return cache


def _does_not_fit(cache: str, num_bytes: int, free: float, where: str) -> errors.DataError:
    return errors.DataError(
        f"--cache={cache}: the decoded images take {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB {where} are free. "
        "Use a smaller --image_size, or --cache=none."
    )


def _remembered(listing: Listing, size: int, channels: int, folder: pathlib.Path, with_pixels: bool) -> Checked:
    """Returns the findings of an earlier run in `folder`, or decodes everything into it."""

    def fill(partial: pathlib.Path) -> None:
        pixels = None
        if with_pixels:
            shape = (len(listing.names), size, size, channels)
            if math.prod(shape) > (free := shutil.disk_usage(partial).free):
                raise _does_not_fit("disk", math.prod(shape), free, f"below {folder.parent}")
            pixels = np.lib.format.open_memmap(partial / _PIXELS, "w+", np.uint8, shape)
        checked = image_check.check(listing, size, channels, pixels)
        if pixels is not None:
            pixels.flush()
        np.savez(partial / _FILES, digests=checked.digests, orientations=checked.orientations)
        (partial / _BAD).write_text(json.dumps(checked.bad))

    try:
        publish.publish_folder(folder, fill, lambda there: (there / _FILES).exists())
        bad = {int(index): why for index, why in json.loads((folder / _BAD).read_text()).items()}
        with np.load(folder / _FILES) as files:
            return Checked(bad, files["digests"], files["orientations"])
    except OSError as error:
        if not with_pixels:
            return image_check.check(listing, size, channels)  # nowhere to remember it
        raise errors.DataError(
            f"--cache=disk: {folder} cannot be written: {error.strerror or error}. Set TOWER_TRAIN_DATA to a directory "
            "that can, or use --cache=memory."
        ) from None


def _left_out(listing: Listing, bad: dict[int, str], good: np.ndarray, skip_bad: bool) -> str:
    """Describes bad files if they may be left out; raises DataError otherwise."""
    named = dict(listing.unusable) | {listing.names[index]: why for index, why in bad.items()}
    if not named:
        return ""
    shown = [f"{image_listing.shown(name)} {why}" for name, why in list(named.items())[:_NAMED]]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    count = len(listing.names) + len(listing.unusable)
    summary = f"{len(named)} of {count} images in {listing.root} cannot be used: {'; '.join(shown)}{more}."
    if not skip_bad:
        raise errors.DataError(f"{summary} Mend or remove them, or add --skip_bad_images to go on without them.")
    for label, class_name in enumerate(listing.class_names):
        if label not in listing.labels[good]:
            raise errors.DataError(f"{summary} No image of class {class_name} is left.")
    return f"Left out: {summary}"
