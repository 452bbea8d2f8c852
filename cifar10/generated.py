"""Drawn images in the CIFAR-10 format, for machines that have neither CIFAR-10 nor a network.

Ten classes: stripes and checks of five periods. Place, rotation, colours and noise vary, and patterns are as often
darker as brighter than their background, so no single pixel gives the class: a linear classifier stays far below a
small convolutional network. No class depends on brightness, on left and right or on the outermost pixels, because the
training augmentations change those.

A seed gives the same images, to the last bit, on every machine: the random numbers are the raw bits of PCG64,
whose stream NumPy promises to keep (NEP 19), and the drawing uses only operations that IEEE 754 defines exactly: no
sine, no exponential, no sum whose order is left open.
"""

import os
import pathlib

import numpy as np

from cifar10 import records
from tower_train import errors
from tower_train.data import publish

IMAGES_PER_FILE = 2000
_SIZE = records.IMAGE_SIZE


def generate(directory: str | os.PathLike) -> pathlib.Path:
    """Returns the folder `directory`/generated-0, with 10,000 drawn training images and 2,000 test images in files
    like CIFAR-10's; draws them if they are missing. Raises DataError if the directory cannot be written to."""
    folder = pathlib.Path(directory, "generated-0")
    try:
        publish.publish_folder(folder, _write, _is_complete)
    except OSError as error:
        raise errors.DataError(
            f"{folder}: the generated images cannot be written: {error.strerror}. Name a directory that can be written "
            "to with --data_dir."
        ) from None
    return folder


def draw(count: int, seed: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws uint8 images [count, 3, 32, 32] and labels [count], the classes taking turns.

    The count is a multiple of 10. Each pair of seed and stream, both at least 0, gives different images.
    """
    labels = (np.arange(count) % len(_CLASSES)).astype(np.uint8)
    images = np.empty((count, records.CHANNELS, _SIZE, _SIZE), np.uint8)
    for label, (pattern, period) in enumerate(_CLASSES.values()):
        bits = np.random.PCG64(np.random.SeedSequence((seed, stream, label)))
        images[label :: len(_CLASSES)] = _draw_class(pattern, period, count // len(_CLASSES), bits)
    return images, labels


def _write(folder: pathlib.Path) -> None:
    for stream, name in enumerate(records.ALL_FILES):
        images, labels = draw(IMAGES_PER_FILE, 0, stream)
        np.column_stack([labels, images.reshape(len(images), -1)]).tofile(folder / name)
    (folder / records.CLASS_NAMES_FILE).write_text("".join(f"{name}\n" for name in CLASS_NAMES))


def _is_complete(folder: pathlib.Path) -> bool:
    size = IMAGES_PER_FILE * records.RECORD_BYTES
    files = [folder / name for name in records.ALL_FILES]
    whole = all(file.is_file() and file.stat().st_size == size for file in files)
    return whole and records.class_names(folder) == CLASS_NAMES


def _draw_class(pattern, period: float, count: int, bits: np.random.BitGenerator) -> np.ndarray:
    """Returns uint8 [count, 3, 32, 32], images of a pattern with this period in pixels."""

    def uniform(low, high, *shape):
        unit = (bits.random_raw((count, *shape)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return low + (high - low) * unit

    at = np.arange(_SIZE, dtype=np.float32)
    x, y = at - uniform(0, 32, 1, 1), at[:, np.newaxis] - uniform(0, 32, 1, 1)
    cosine, sine = uniform(-1, 1, 1, 1), uniform(-1, 1, 1, 1)
    length = np.maximum(np.sqrt(cosine * cosine + sine * sine), np.float32(1e-6))
    cosine, sine = cosine / length, sine / length
    inside = pattern(cosine * x + sine * y, cosine * y - sine * x, np.float32(period))
    covered = np.clip(inside + 0.5, 0, 1)[:, np.newaxis]  # how much of each pixel: edges are smooth
    sign = np.where(uniform(0, 1, 3, 1, 1) < 0.5, np.float32(-1), np.float32(1))
    contrast = sign * uniform(45, 110, 3, 1, 1)  # grey levels; visible in the strongest noise
    noise = uniform(-1, 1, 3, _SIZE, _SIZE) + uniform(-1, 1, 3, _SIZE, _SIZE)
    return np.clip(uniform(80, 176, 3, 1, 1) + contrast * covered + uniform(4, 24, 1, 1, 1) * noise, 0, 255).astype(
        np.uint8
    )


def _stripes(u, v, period):
    """Returns each pixel's distance inside the nearest stripe; half of all pixels are inside one."""
    phase = u / period - np.floor(u / period)
    return (np.float32(0.25) - np.abs(phase - np.float32(0.5))) * period


def _checks(u, v, period):
    across, along = _stripes(u, v, period), _stripes(v, u, period)
    return np.copysign(np.minimum(np.abs(across), np.abs(along)), across * along)


# Each pattern maps coordinates u, v [count, 32, 32] in pixels to a pixel's distance inside the pattern's edge.
_CLASSES = {
    f"{pattern.__name__[1:]} of {period:g}": (pattern, period)
    for pattern in (_stripes, _checks)
    for period in (4, 5.5, 8, 11.5, 16)
}
CLASS_NAMES = tuple(_CLASSES)
