"""Colours of images, and RandAugment, for a whole batch at a time: what torchvision does with Pillow.

Images are float32 [batch, height, width, 1 or 3] of whole numbers from 0 to 255, as are the results. Each result is
that of the image alone, to the bit: sums are of whole numbers that their type holds exactly, and no division by a
constant falls on a whole number, as TensorFlow turns it into a product in some graphs.
"""

import itertools
import math

import numpy as np
import tensorflow as tf

from tower_train.workload import Draws

OPERATIONS = (  # of RandAugment, in torchvision's order
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
MOST_MAGNITUDE = 30
_SATURATION, _CONTRAST = 1, 2  # 0 is brightness


def color_jitter(images: tf.Tensor, draws: Draws, most: float) -> tf.Tensor:
    """Changes brightness, contrast and saturation, in a random order, by factors from 1 - most to 1 + most."""
    numbers, least = draws.uniform("color_jitter", 4), max(0.0, 1 - most)
    factors = least + (1 + most - least) * numbers[:, :3]
    orders = tf.constant(list(itertools.permutations(range(3))), tf.int64)
    order = tf.gather(orders, tf.cast(tf.floor(6 * numbers[:, 3]), tf.int64))
    images = tf.cast(images, tf.float32)
    for turn in range(3):
        images = _coloured(images, order[:, turn], tf.gather(factors, order[:, turn], batch_dims=1))
    return images


def randaugment(images: tf.Tensor, draws: Draws, magnitude: int) -> tf.Tensor:
    """Does two random operations on each image (Cubuk et al. 2019, arXiv 1909.13719)."""
    images, numbers = tf.cast(images, tf.float32), draws.uniform("randaugment", 4)
    for turn in range(2):
        operations = tf.cast(tf.floor(len(OPERATIONS) * numbers[:, 2 * turn]), tf.int64)
        signs = tf.where(numbers[:, 2 * turn + 1] < 0.5, 1.0, -1.0)
        images = _operated(images, operations, signs, magnitude / MOST_MAGNITUDE)
    return images


def _operated(images: tf.Tensor, operations: tf.Tensor, signs: tf.Tensor, strength: float) -> tf.Tensor:
    """Does one operation on each image, of this sign (1 or -1) and strength (0 to 1)."""
    levels, threshold = 2.0 ** round(4 * strength), 255 - 255 * strength
    groups = [  # (first operation, the one after the last, function of their images, operations and signs)
        (0, 1, lambda images, *_: images),
        (
            1,
            6,
            lambda images, operations, signs: _moved(
                images, 2 * operations - 2 + tf.cast(signs < 0, tf.int64), strength
            ),
        ),
        (6, 9, lambda images, operations, signs: _coloured(images, operations - 6, 1 + 0.9 * strength * signs)),
        (9, 10, lambda images, _, signs: _blended(images, _smoothed(images), 1 + 0.9 * strength * signs)),
        (10, 11, lambda images, *_: tf.floor(images / levels) * levels),
        (11, 12, lambda images, *_: tf.where(images < threshold, images, 255 - images)),
        (12, 13, lambda images, *_: _stretched(images)),
        (13, 14, lambda images, *_: _equalized(images)),
    ]
    places = [tf.where((operations >= first) & (operations < end))[:, 0] for first, end, _ in groups]
    results = [  # each function computes no other images
        function(*(tf.gather(each, place) for each in (images, operations, signs)))
        for (*_, function), place in zip(groups, places, strict=True)
    ]
    return tf.ensure_shape(tf.dynamic_stitch([tf.cast(place, tf.int32) for place in places], results), images.shape)


def spread(numbers: tf.Tensor) -> tf.Tensor:
    """Gives numbers of images [batch] the dimensions of images."""
    return numbers[:, tf.newaxis, tf.newaxis, tf.newaxis]


def _coloured(images: tf.Tensor, kinds: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Changes brightness, saturation or contrast of each image (kind 0, 1 or 2) by a factor."""
    gray, kinds = _gray(images), spread(kinds)
    # float32 holds the sums of columns, float64 that of all.
    sums = tf.reduce_sum(tf.cast(tf.reduce_sum(gray, axis=1, keepdims=True), tf.float64), axis=2, keepdims=True)
    mean = tf.cast(tf.floor((sums + 0.01) * (1 / (images.shape[1] * images.shape[2])) + 0.5), tf.float32)
    degenerate = tf.where(tf.equal(kinds, _CONTRAST), mean, tf.zeros_like(mean))
    return _blended(images, tf.where(tf.equal(kinds, _SATURATION), gray, degenerate), factors)


def _blended(images: tf.Tensor, degenerate: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Moves images to or, by a factor above 1, away from their degenerate ones: Pillow's ImageEnhance."""
    return tf.floor(tf.clip_by_value(degenerate + spread(factors) * (images - degenerate), 0, 255))


def _gray(images: tf.Tensor) -> tf.Tensor:
    """Returns the luma of ITU-R 601-2 as Pillow rounds it, [batch, height, width, 1]."""
    if images.shape[3] == 1:
        return images
    red, green, blue = tf.split(images, 3, axis=3)
    return tf.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)  # below 2^24: exact


def _smoothed(images: tf.Tensor) -> tf.Tensor:
    """Averages pixels, of weight 5, with their eight neighbours, except at the edge: Pillow's SMOOTH."""
    rows, inner = images[:, :-2] + images[:, 1:-1] + images[:, 2:], images[:, 1:-1, 1:-1]
    box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    return images + tf.pad(tf.floor((box + 4 * inner) / 13 + 0.5) - inner, [[0, 0], [1, 1], [1, 1], [0, 0]])


def _moved(images: tf.Tensor, motions: tf.Tensor, strength: float) -> tf.Tensor:
    """Shears, shifts or rotates each image, by the operation motions // 2 + 1, backwards if motions is odd."""
    height, width = size = images.shape[1:3]
    middle, transforms = np.array([width, height]) / 2, []
    for i, most in enumerate([0.3, 0.3, 150 / 331 * width, 150 / 331 * height, math.radians(30)]):
        for sign in (1, -1):
            shear_x, shear_y, across, down, angle = np.eye(5)[i] * sign * strength * most
            rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            # From a pixel of the result to one of the image, by indices, which are half a pixel from the middles.
            matrix = rotation + [[0, shear_x], [shear_y, 0]]
            offset = middle - rotation @ middle + matrix @ [0.5, 0.5] - 0.5 - [int(across), int(down)]
            transforms.append([*matrix[0], offset[0], *matrix[1], offset[1], 0, 0])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.gather(tf.constant(transforms, tf.float32), motions),
        output_shape=size,
        fill_value=0.0,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )


def _stretched(images: tf.Tensor) -> tf.Tensor:
    """Stretches each channel to 0..255: Pillow's autocontrast."""
    low, high = (reduce(images, axis=[1, 2], keepdims=True) for reduce in (tf.reduce_min, tf.reduce_max))
    return tf.where(high > low, tf.floor((images - low) * 255 / tf.maximum(high - low, 1)), images)


def _equalized(images: tf.Tensor) -> tf.Tensor:
    """Makes the histogram of each channel flat: Pillow's equalize."""
    height, width, channels = images.shape[1:]
    histograms = tf.shape(images, tf.int64)[0] * channels
    first_bins = tf.reshape(tf.range(histograms) * 256, [-1, 1, 1, channels])
    bins = tf.cast(images, tf.int64) + first_bins
    ones = tf.ones_like(images)
    counts = tf.math.unsorted_segment_sum(ones, bins, histograms * 256)
    counts = tf.reshape(counts, [-1, channels, 256])
    brightest = tf.cast(tf.reduce_max(images, axis=[1, 2]), tf.int64)
    others = height * width - tf.gather(counts, brightest, batch_dims=2)
    step = tf.floor((others + 0.5) * (1 / 255))[..., tf.newaxis]
    below = tf.cumsum(counts, axis=2, exclusive=True)
    levels = tf.minimum(tf.floor((below + tf.floor(step / 2)) / tf.maximum(step, 1)), 255)
    levels = tf.where(step > 0, levels, tf.range(256, dtype=tf.float32))
    return tf.gather(tf.reshape(levels, [-1]), bins)
