"""Augmentation of images by options, for a whole batch at a time, as torchvision and timm do it image by image.

Each number is drawn by the example's position, so N towers, a resumed run and several machines make the same pictures.
mixup and cutmix mix an example with its neighbour, examples 2k and 2k + 1 of a batch: the order is random already, no
division into batches of even sizes separates the two, and neither is read twice. A partner from anywhere in a
tower's batch would depend on the number of towers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train.data.colours import color_jitter, spread
from tower_train.examples import Mixed, Weighted
from tower_train.options import AUGMENTATION, Options, option
from tower_train.workload import Draws

# torchvision's: the tries to find a box that fits, ratios of width to height, shares of the area.
_TRIES, _CROP_RATIO, _ERASED_RATIO, _ERASED_SHARE = 10, (3 / 4, 4 / 3), (1 / 3.3, 1 / 0.3), (0.02, 0.33)
_PARTS = 4096  # of the integral in `beta`
_ALPHAS = "at least 0 and at most 100"
_change = functools.partial(option, group=AUGMENTATION)


@dataclasses.dataclass(frozen=True)
class ImageOptions(Options):
    """Changes of training images for workloads that crop and flip themselves."""

    color_jitter: float = _change(
        0.0, "change brightness, contrast and saturation by factors of 1 -/+ up to this, e.g. 0.4", allowed="at least 0"
    )
    random_erasing: float = _change(
        0.0, "probability of erasing a rectangle, e.g. 0.25", allowed="at least 0 and at most 1"
    )
    mixup_alpha: float = _change(
        0.0, "mix images and labels in pairs, by shares of this beta distribution, e.g. 0.2", allowed=_ALPHAS
    )
    cutmix_alpha: float = _change(
        0.0,
        "paste a rectangle of another image, its share by this beta distribution, e.g. 1; with --mixup_alpha "
        "each image gets one of both",
        allowed=_ALPHAS,
    )


@dataclasses.dataclass(frozen=True)
class PlacedImageOptions(ImageOptions):
    """Changes of training images, crops and flips included."""

    random_resized_crop: float = _change(
        0.0,
        "resize crops of at least this share of an image, which already has the network's size, to that, e.g. 0.08",
        allowed="at least 0 and at most 1",
    )
    flip: bool = _change(False, "flip half of the training images left to right")
    vertical_flip: bool = _change(False, "flip half of them upside down")


def functions(
    options: ImageOptions,
    prepare: Callable[[tf.Tensor], tf.Tensor] = lambda images: images,
    augment: Callable[[tf.Tensor, Draws], tf.Tensor] | None = None,
) -> dict[str, Callable | None]:
    """Makes the fields `augment` and `mix` of a workload of images 0..255 [batch, height, width, 1 or 3].

    Its `prepare`, or the `augment` of its own that replaces it, comes after crops, flips and colours, and before
    erasing and mixing.
    """
    alphas = options.mixup_alpha, options.cutmix_alpha
    change = functools.partial(_augmented, chosen=vars(options), own=augment or (lambda images, _: prepare(images)))
    return {
        "augment": change if any(vars(options).get(name) for name in (*_BEFORE, "random_erasing")) else augment,
        "mix": functools.partial(mixed, alphas=alphas) if any(alphas) else None,
    }


def _augmented(images: tf.Tensor, draws: Draws, chosen: dict, own: Callable) -> tf.Tensor:
    for name, change in _BEFORE.items():
        if amount := chosen.get(name):
            images = change(images, draws, amount)
    images, probability = own(images, draws), chosen["random_erasing"]
    return random_erasing(images, draws, probability) if probability else images


def _flipped(images: tf.Tensor, draws: Draws, _, name: str, axis: int) -> tf.Tensor:
    return tf.where(spread(draws.uniform(name, 1)[:, 0] < 0.5), tf.reverse(images, [axis]), images)


def random_resized_crop(images: tf.Tensor, draws: Draws, least: float) -> tf.Tensor:
    """Crops a share from `least` to 1 of each image, and resizes it to the image's size by Pillow's bilinear filter."""
    height, width = size = images.shape[1:3]
    fits, *boxes = _boxes(draws, "random_resized_crop", size, (least, 1.0), _CROP_RATIO, size)
    tall, wide = min(height, round(width / _CROP_RATIO[0])), min(width, round(height * _CROP_RATIO[1]))
    centre = tall, wide, (height - tall) // 2, (width - wide) // 2
    tall, wide, top, left = (tf.where(fits, *each) for each in zip(boxes, map(float, centre), strict=True))
    turned = tf.transpose(tf.cast(images, tf.float32), [0, 2, 1, 3])
    return _stretched_rows(tf.transpose(_stretched_rows(turned, left, wide), [0, 2, 1, 3]), top, tall)


def random_erasing(images: tf.Tensor, draws: Draws, probability: float) -> tf.Tensor:
    """Sets a rectangle of some images to 0 (Zhong et al. 2017, arXiv 1708.04896)."""
    height, width = size = images.shape[1:3]
    fits, *box = _boxes(draws, "random_erasing", size, _ERASED_SHARE, _ERASED_RATIO, (height - 1, width - 1))
    erased = fits & (draws.uniform("random_erasing of this", 1)[:, 0] < probability)
    return tf.where(spread(erased) & inside(box, size), tf.zeros([], images.dtype), images)


def mixed(images: tf.Tensor, labels: tf.Tensor, draws: Draws, alphas: tuple[float, float]) -> tuple[tf.Tensor, Mixed]:
    """Mixes each image with its neighbour: mixup (Zhang et al. 2017, arXiv 1710.09412, section 2), cutmix (Yun et al.
    2019, arXiv 1905.04899, section 3.1), or either with probability 1/2, as timm's Mixup in its mode 'pair': both of a
    pair get the same share of the other, and the same rectangle.

    The batch is even; images of whole numbers become float32. Of the alphas, of mixup and of cutmix, one may be 0.
    """
    images = images if images.dtype.is_floating else tf.cast(images, tf.float32)
    numbers = tf.repeat(draws.uniform("mix", 4)[::2], 2, axis=0)
    neighbours, size = _neighbours(images), images.shape[1:3]
    results = []  # over the kinds, images and the share of each in its own
    if alphas[0]:
        share = beta(numbers[:, 0], alphas[0])
        weight = spread(tf.cast(share, images.dtype))
        results.append((weight * images + (1 - weight) * neighbours, share))
    if alphas[1]:
        side = tf.sqrt(1 - beta(numbers[:, 0], alphas[1]))
        starts, lengths = [], []
        for i, extent in enumerate(size, 1):
            middle, length = tf.floor(extent * numbers[:, i]), tf.floor(extent * side)
            starts.append(tf.maximum(middle - tf.floor(length / 2), 0))
            lengths.append(tf.minimum(middle + tf.floor((length + 1) / 2), extent) - starts[-1])
        pasted = tf.where(inside((*lengths, *starts), size), neighbours, images)
        results.append((pasted, 1 - math.prod(lengths) * (1 / math.prod(size))))
    images, share = results[-1]
    if all(alphas):
        is_cut = numbers[:, 3] < 0.5
        images, share = tf.where(spread(is_cut), images, results[0][0]), tf.where(is_cut, share, results[0][1])
    labels, weights = Weighted.of(labels)
    weights = tf.ones_like(share) if weights is None else tf.cast(weights, share.dtype)
    other = Weighted(_neighbours(labels), (1 - share) * _neighbours(weights))
    return images, Mixed(Weighted(labels, share * weights), other)


def beta(uniform: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns the quantiles of Beta(alpha, alpha) at numbers in [0, 1), float32, to about 1e-6.

    The distribution is symmetric; its lower half is integrated over t with x = t^p / 2, where the density has no pole.
    """
    power = max(1 / alpha, 1)
    middle = (np.arange(_PARTS) + 0.5) / _PARTS
    density = middle ** (power * alpha - 1) * (2 - middle**power) ** (alpha - 1)
    below = tf.constant(np.concatenate([[0], np.cumsum(density)]) / (2 * density.sum()), tf.float64)
    half = tf.cast(tf.minimum(uniform, 1 - uniform), tf.float64)  # powers in float32 depend on the batch's size
    part = tf.minimum(tf.searchsorted(below, half, "right", tf.int64) - 1, _PARTS - 1)
    start, end = tf.gather(below, part), tf.gather(below, part + 1)
    t = (tf.cast(part, tf.float64) + (half - start) / (end - start)) * (1 / _PARTS)
    x = tf.cast(0.5 * t**power, tf.float32)
    return tf.where(uniform < 0.5, x, 1 - x)


def _neighbours(tensor: tf.Tensor) -> tf.Tensor:
    """Swaps rows 2k and 2k + 1."""
    tensor = tf.cast(tensor, tf.int64) if tensor.dtype == tf.int32 else tensor  # GPUs have no gather of int32
    return tf.gather(tensor, tf.constant(np.arange(tensor.shape[0]) ^ 1, tf.int64))


def _boxes(draws: Draws, name: str, size: Sequence[int], shares: tuple, ratios: tuple, most: Sequence[int]) -> tuple:
    """Draws a rectangle of each image, the first of ten that fits: of a share of its area, a ratio of width to height,
    and at most so high and wide.

    Returns:
      Whether one fits, bool [batch]; its height, width, top and left, float32 [batch] of whole numbers.
    """
    numbers = tf.cast(draws.uniform(name, 2 * _TRIES + 2), tf.float64)  # exp in float32 depends on the batch's size
    area = math.prod(size) * (shares[0] + (shares[1] - shares[0]) * numbers[:, :_TRIES])
    low, high = map(math.log, ratios)
    ratio = tf.exp(low + (high - low) * numbers[:, _TRIES : 2 * _TRIES])
    tall, wide = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
    fits = (0 < tall) & (tall <= most[0]) & (0 < wide) & (wide <= most[1])
    failed = tf.reduce_sum(tf.math.cumprod(1 - tf.cast(fits, tf.float32), axis=1), axis=1)
    chosen = tf.cast(tf.minimum(failed, _TRIES - 1), tf.int64)
    tall, wide = (tf.gather(each, chosen, batch_dims=1) for each in (tall, wide))
    top, left = tf.floor(numbers[:, -2] * (size[0] - tall + 1)), tf.floor(numbers[:, -1] * (size[1] - wide + 1))
    return failed < _TRIES, *(tf.cast(each, tf.float32) for each in (tall, wide, top, left))


def inside(box: Sequence[tf.Tensor], size: Sequence[int]) -> tf.Tensor:
    """Returns bool [batch, height, width, 1]: the pixels in the box (height, width, top, left) of each image.

    box: float32 [batch], or [1] for all. size: height and width of the images.
    """
    tall, wide, top, left = map(spread, box)
    rows, columns = tf.range(size[0], dtype=tf.float32)[:, tf.newaxis], tf.range(size[1], dtype=tf.float32)
    rows, columns = rows[..., tf.newaxis], columns[:, tf.newaxis]
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


def _stretched_rows(images: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Stretches `count` rows of each image, from `first` on, to all rows: linear between the middles of rows."""
    first, last = first[:, tf.newaxis], (first + count - 1)[:, tf.newaxis]
    rows = images.shape[1]
    middles = tf.constant((np.arange(rows) + 0.5) / rows, tf.float32)
    places = first + (middles * (last - first + 1) - 0.5)
    places = tf.clip_by_value(places, first, last)
    above = tf.floor(places)
    below = tf.minimum(above + 1, last)
    upper, lower = (tf.gather(images, tf.cast(row, tf.int64), batch_dims=1) for row in (above, below))
    return tf.floor(upper + (places - above)[:, :, tf.newaxis, tf.newaxis] * (lower - upper) + 0.5)


_BEFORE = {  # {option: its change before `prepare`}, in their order
    "flip": functools.partial(_flipped, name="flip", axis=2),
    "vertical_flip": functools.partial(_flipped, name="vertical_flip", axis=1),
    "random_resized_crop": random_resized_crop,
    "color_jitter": color_jitter,
}
