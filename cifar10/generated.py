"""Drawn images in the CIFAR-10 format, for machines that have neither CIFAR-10 nor a network.

Ten classes: six shapes and four textures. Place, size, rotation, colours, background and noise vary, and figures are as
often darker as brighter than their background, so no single pixel gives the class: a linear classifier stays far below
a small convolutional network after a thousand steps. No class depends on brightness, on left and right or on the
outermost pixels, because the training augmentations change those.

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
    for label, inside in enumerate(_CLASSES.values()):
        bits = np.random.PCG64(np.random.SeedSequence((seed, stream, label)))
        images[label :: len(_CLASSES)] = _draw_class(inside, count // len(_CLASSES), bits)
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


def _draw_class(inside, count: int, bits: np.random.BitGenerator) -> np.ndarray:
    """Returns uint8 [count, 3, 32, 32], images of the class whose figure is `inside`, see _CLASSES."""

    def uniform(low, high, *shape):
        unit = (bits.random_raw((count, *shape)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return low + (high - low) * unit

    u, v = _figure_coordinates(uniform)
    covered = np.clip(inside(u, v) + 0.5, 0, 1)[:, np.newaxis]  # how much of each pixel: edges are smooth
    sign = np.where(uniform(0, 1, 3, 1, 1) < 0.5, np.float32(-1), np.float32(1))
    contrast = sign * uniform(45, 110, 3, 1, 1)  # grey levels; visible in the strongest noise
    noise = uniform(-1, 1, 3, _SIZE, _SIZE) + uniform(-1, 1, 3, _SIZE, _SIZE)
    strength = uniform(4, 24, 1, 1, 1)
    return np.clip(_background(uniform) + contrast * covered + strength * noise, 0, 255).astype(np.uint8)


def _pixels(centre_x, centre_y):
    """Returns coordinates [count, 32, 32] of the pixels as seen from a centre [count, 1, 1], in pixels."""
    at = np.arange(_SIZE, dtype=np.float32)
    x, y = np.broadcast_arrays(at - centre_x, at[:, np.newaxis] - centre_y)
    return x, y


def _direction(uniform):
    """Draws unit vectors (x, y), each [count, 1, 1], in all directions."""
    x, y = uniform(-1, 1, 1, 1), uniform(-1, 1, 1, 1)
    length = np.maximum(np.sqrt(x * x + y * y), np.float32(1e-6))
    return x / length, y / length


def _figure_coordinates(uniform):
    """Returns pixel coordinates [count, 32, 32] in a frame that is shifted, rotated and scaled at random."""
    middle = (_SIZE - 1) / 2
    x, y = _pixels(uniform(middle - 3, middle + 3, 1, 1), uniform(middle - 3, middle + 3, 1, 1))
    cosine, sine = _direction(uniform)
    scale = uniform(0.8, 1.2, 1, 1)
    return (cosine * x + sine * y) / scale, (cosine * y - sine * x) / scale


def _background(uniform):
    """Draws a colour [count, 3, 32, 32] that changes at one straight edge and slopes across the image."""
    x, y = _pixels(uniform(8, 24, 1, 1), uniform(8, 24, 1, 1))
    cosine, sine = _direction(uniform)
    across = (cosine * x + sine * y)[:, np.newaxis]
    side = np.clip(across + 0.5, 0, 1)
    return uniform(80, 176, 3, 1, 1) + uniform(-30, 30, 3, 1, 1) * side + uniform(-1.5, 1.5, 3, 1, 1) * across


def _radius(u, v):
    return np.sqrt(u * u + v * v)


def _box(u, v, width, height):
    return np.minimum(width - np.abs(u), height - np.abs(v))


def _triangle(u, v, radius):
    slope = np.float32(0.8660254)  # of a side, sqrt(3) / 2
    return radius - np.maximum(v, slope * np.abs(u) - v / 2)


def _wave(u, period):
    """Returns each pixel's distance inside the nearest stripe; half of all pixels are inside one."""
    phase = u / period - np.floor(u / period)
    return (np.float32(0.25) - np.abs(phase - np.float32(0.5))) * period


def _checks(u, v):
    across, along = _wave(u, 9), _wave(v, 9)
    return np.copysign(np.minimum(np.abs(across), np.abs(along)), across * along)


def _dots(u, v):
    spacing = np.float32(9)
    return np.float32(2.5) - _radius(u - spacing * np.round(u / spacing), v - spacing * np.round(v / spacing))


# Each figure maps coordinates u, v [count, 32, 32] in pixels to a pixel's distance inside the figure's edge.
_CLASSES = {
    "circle": lambda u, v: 8 - _radius(u, v),
    "ring": lambda u, v: 2 - np.abs(_radius(u, v) - 7),
    "bar": lambda u, v: _box(u, v, 10, 4),
    "triangle": lambda u, v: _triangle(u, v, 5),
    "star": lambda u, v: np.maximum(_triangle(u, v, 4.5), _triangle(u, -v, 4.5)),
    "cross": lambda u, v: np.maximum(_box(u, v, 9, 2.5), _box(u, v, 2.5, 9)),
    "stripes": lambda u, v: _wave(u, 6),
    "checks": _checks,
    "dots": _dots,
    "ripples": lambda u, v: _wave(_radius(u, v), 6),
}
CLASS_NAMES = tuple(_CLASSES)
