"""Image folders as `Examples`: checked, decoded once if the result fits in memory or on disk, fetched by index."""

import json
import math
import pathlib
import shutil

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.data import arrays, decoding, image_files, publish
from tower_train.data.directories import default_directory
from tower_train.examples import Examples

CACHES = ("auto", "none", "memory", "disk")

_NAMED = 20  # bad files that a message names; it counts the others
_BAD, _PIXELS = "bad.json", "pixels.npy"


def examples(
    listing: image_files.Listing,
    name: str,
    size: int,
    channels: int,
    cache: str = "auto",
    skip_bad: bool = False,
    cache_dir: pathlib.Path | None = None,
) -> Examples:
    """Makes the examples of a listing, after decoding every file once.

    The bad files are remembered in `cache_dir` (with 'disk' together with the decoded images) as long as no file of the
    listing changes; 'memory' writes nothing.

    Args:
      listing: from image_files.find.
      name: what the data set is called in logs.
      size: height and width that images are resized to.
      channels: 1 for grayscale, 3 for RGB.
      cache: where decoded images are kept: 'memory', 'disk', 'none', or 'auto', which is memory if they take at most
        half of what is free, and else none.
      skip_bad: go on without the files that cannot be used, instead of an error.
      cache_dir: None for image_folder in the default data directory.

    Returns:
      Examples whose `fetch` gives uint8 [batch, size, size, channels] images and int32 [batch] labels; their `notice`
      tells what was left out.

    Raises:
      DataError: files that cannot be used, without skip_bad; all of a class, with it; or a cache that does not fit.
    """
    cache_dir = cache_dir or default_directory() / "image_folder"
    shape = (len(listing.names), size, size, channels)
    cache = place(cache, math.prod(shape), host.free_memory() or 0)  # if that is not known, nothing is kept unasked
    pixels = None
    if cache == "memory":
        pixels = np.empty(shape, np.uint8)
        bad = decoding.find_bad(listing, size, channels, pixels)
    else:
        kind = f"{size}x{channels}" if cache == "disk" else f"checked{channels}"
        folder = cache_dir / f"{image_files.fingerprint(listing, modified=True)}-{kind}"
        bad = _remembered(listing, size, channels, folder, cache == "disk")
        pixels = np.load(folder / _PIXELS, mmap_mode="r") if cache == "disk" else None
    good = np.setdiff1d(np.arange(len(listing.names)), list(bad))
    left_out = _left_out(listing, bad, good, skip_bad)
    used = listing.subset(good)
    return Examples(
        name=name,
        num_examples=len(good),
        open=lambda: _fetcher(used, good, pixels, size, channels),
        fingerprint=image_files.fingerprint(used),
        class_names=listing.class_names,
        notice=" ".join(filter(None, [left_out, listing.passed_over])) or None,
        parallel_steps=2 if pixels is not None else host.cores(),
        labels=used.labels,
    )


def _fetcher(used: image_files.Listing, good: np.ndarray, pixels: np.ndarray | None, size: int, channels: int):
    by_index = arrays.fetcher(np.array(used.paths()) if pixels is None else good, used.labels)

    def decode(path: tf.Tensor) -> tf.Tensor:
        return decoding.decode_contents(tf.io.read_file(path), size, size, channels)

    def fetch(indices: tf.Tensor):
        found, labels = by_index(indices)
        if pixels is None:
            return tf.map_fn(decode, found, fn_output_signature=tf.uint8), labels
        return *arrays.fetcher(pixels)(found), labels

    return fetch


def place(cache: str, num_bytes: int, free_bytes: int) -> str:
    """Chooses where decoded images are kept: 'memory', 'disk' or 'none'.

    Raises DataError if cache is 'memory' and they take more bytes than are free there.
    """
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


def _remembered(listing, size: int, channels: int, folder: pathlib.Path, with_pixels: bool) -> dict[int, str]:
    """Finds the bad files from what an earlier run left in `folder`, or by decoding everything into it."""

    def fill(partial: pathlib.Path) -> None:
        pixels = None
        if with_pixels:
            shape = (len(listing.names), size, size, channels)
            if math.prod(shape) > (free := shutil.disk_usage(partial).free):
                raise _does_not_fit("disk", math.prod(shape), free, f"below {folder.parent}")
            pixels = np.lib.format.open_memmap(partial / _PIXELS, "w+", np.uint8, shape)
        bad = decoding.find_bad(listing, size, channels, pixels)
        if pixels is not None:
            pixels.flush()
        (partial / _BAD).write_text(json.dumps(bad))

    try:
        publish.publish_folder(folder, fill, lambda there: (there / _BAD).exists())
        return {int(index): why for index, why in json.loads((folder / _BAD).read_text()).items()}
    except OSError as error:
        if not with_pixels:
            return decoding.find_bad(listing, size, channels)  # nowhere to remember it
        raise errors.DataError(
            f"--cache=disk: {folder} cannot be written: {error.strerror or error}. Set TOWER_TRAIN_DATA to a directory "
            "that can, or use --cache=memory."
        ) from None


def _left_out(listing: image_files.Listing, bad: dict[int, str], good: np.ndarray, skip_bad: bool) -> str:
    """Tells the user of bad files, if they may be left out; refuses them otherwise."""
    if not bad:
        return ""
    shown = [f"{image_files.shown(listing.names[index])} {why}" for index, why in list(bad.items())[:_NAMED]]
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    summary = f"{len(bad)} of {len(listing.names)} images in {listing.root} cannot be used: {'; '.join(shown)}{more}."
    if not skip_bad:
        raise errors.DataError(f"{summary} Mend or remove them, or add --skip_bad_images to go on without them.")
    for label, class_name in enumerate(listing.class_names):
        if label not in listing.labels[good]:
            raise errors.DataError(f"{summary} No image of class {class_name} is left.")
    return f"Left out: {summary}"
