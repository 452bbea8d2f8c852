"""Changes of images are those of Pillow, of torchvision's published loops and of the papers, and know no towers."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import values
from PIL import Image, ImageEnhance

from tower_train.data import augmentation, colours
from tower_train.examples import Weighted
from tower_train.graph import towers
from tower_train.workload import Workload

v1 = tf.compat.v1
NUMBERS = np.random.default_rng(1).uniform(size=[40, 22]).astype(np.float32)
NUMBERS[4] = 0.5  # at which choices of two change


def photos(count, shape, seed=0):
    """Smooth images with noise, some of little contrast, the last of one colour."""
    rng, (height, width, channels) = np.random.default_rng(seed), shape
    rows, columns = np.mgrid[:height, :width]
    waves = [[np.sin(columns / (3 + i) + rows / (5 + k)) for i in range(channels)] for k in range(count)]
    images = 127 + np.moveaxis(waves, 1, -1) * np.linspace(120, 20, count)[:, None, None, None]
    images = np.clip(images + rng.normal(0, 9, images.shape), 0, 255).astype(np.uint8)
    images[-1] = 90
    return images


def pillow(image):
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


@pytest.mark.parametrize(("option", "axis"), [("flip", 2), ("vertical_flip", 1)])
def test_images_with_a_number_below_a_half_are_flipped(option, axis):
    images, options = photos(4, (9, 12, 3)), augmentation.PlacedImageOptions(**{option: True})
    expected, draws = images.copy(), values.GivenDraws(np.array([[0.0], [0.5], [0.75], [0.49]]))
    expected[[0, 3]] = np.flip(images, axis)[[0, 3]]
    for own, more in ((None, 0), (lambda images, draws: images + 1, 1)):
        change = functools.partial(augmentation.functions(options, augment=own)["augment"], draws=draws)
        np.testing.assert_array_equal(values.of(change, images), expected + more)


def test_colours_change_in_a_random_order_as_pillows():
    images = photos(40, (20, 24, 3))
    found = values.of(lambda: colours.color_jitter(tf.constant(images), values.GivenDraws(NUMBERS), 0.4))
    kinds = [ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast]
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for result, image, numbers in zip(found, images, NUMBERS, strict=True):
        expected = pillow(image)
        for kind in orders[int(numbers[3] * 6)]:
            expected = kinds[kind](expected).enhance(float(np.float32(0.6) + np.float32(0.8) * numbers[kind]))
        # A factor rounded otherwise moves a value over a whole number here and there.
        assert np.abs(result - np.asarray(expected)).max() <= 2 and np.mean(result != np.asarray(expected)) < 0.01


def box(numbers, height, width, shares, ratios, most):
    """torchvision's `get_params`: height, width, top, left; None if ten do not fit."""
    for i in range(10):
        area = height * width * (shares[0] + (shares[1] - shares[0]) * numbers[i])
        ratio = math.exp(math.log(ratios[0]) + (math.log(ratios[1]) - math.log(ratios[0])) * numbers[10 + i])
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= most[1] and 0 < tall <= most[0]:
            return tall, wide, int(numbers[20] * (height - tall + 1)), int(numbers[21] * (width - wide + 1))
    return None


@pytest.mark.parametrize(("height", "width", "least"), [(28, 28, 0.08), (24, 40, 0.95)])
def test_crops_are_resized_as_pillows(height, width, least):
    images = photos(40, (height, width, 3))
    found = values.of(lambda: augmentation.random_resized_crop(tf.constant(images), values.GivenDraws(NUMBERS), least))
    fallbacks = 0
    for result, image, numbers in zip(found, images, NUMBERS, strict=True):
        chosen = box(numbers, height, width, (least, 1), (3 / 4, 4 / 3), (height, width))
        fallbacks += chosen is None
        tall, wide, top, left = chosen or (24, 32, 0, 4)  # the widest of 4 / 3, in the middle
        expected = pillow(image[top : top + tall, left : left + wide]).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        assert np.abs(result - np.asarray(expected)).max() <= 1
        assert np.mean(result != np.asarray(expected)) < 0.05  # Pillow computes in whole numbers
    assert (fallbacks > 0) == (least > 0.5)


@pytest.mark.parametrize(("height", "width"), [(30, 12), (12, 30)])
def test_a_rectangle_of_some_images_is_erased(height, width):
    images = photos(40, (height, width, 3)).astype(np.float32) + 1
    found = values.of(lambda: augmentation.random_erasing(tf.constant(images), values.GivenDraws(NUMBERS), 0.5))
    for result, image, numbers in zip(found, images.copy(), NUMBERS, strict=True):
        chosen = box(numbers, height, width, (0.02, 0.33), (1 / 3.3, 1 / 0.3), (height - 1, width - 1))
        if chosen and numbers[0] < 0.5:
            tall, wide, top, left = chosen
            image[top : top + tall, left : left + wide] = 0
        np.testing.assert_array_equal(result, image)
    assert 0.3 < np.mean(found.min(axis=(1, 2, 3)) == 0) < 0.7


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_shares_are_quantiles_of_the_beta_distribution(alpha):
    lower = np.linspace(0, 0.5, 401).astype(np.float32)
    found = values.of(lambda: augmentation.beta(tf.constant(lower), alpha))
    shares = values.of(lambda: tf.math.betainc(np.float64(alpha), np.float64(alpha), found.astype(np.float64)))
    np.testing.assert_allclose(shares, lower, atol=1e-5)
    np.testing.assert_allclose(
        values.of(lambda: augmentation.beta(tf.constant(1 - lower[1:]), alpha)), 1 - found[1:], atol=1e-6
    )


@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_neighbours_and_their_labels_are_mixed(alphas):
    images, labels = photos(40, (12, 16, 3)).astype(np.float32), np.arange(40, dtype=np.int32) % 3
    weights, logits = np.linspace(0.5, 2, 40).astype(np.float32), np.random.default_rng(2).normal(size=[40, 3])

    def mixed():
        given = tf.nest.map_structure(tf.constant, (images, Weighted(labels, weights)))
        pixels, mixed_labels = augmentation.mixed(*given, values.GivenDraws(NUMBERS), alphas)
        workload = Workload("mixed", None, lambda features, training: features)
        return pixels, mixed_labels, towers.tower_loss(workload, tf.constant(logits), mixed_labels, tf.float64)[1]

    pixels, _, loss = values.of(mixed)
    soft = np.zeros([40, 3])
    for i, (result, numbers) in enumerate(zip(pixels, np.repeat(NUMBERS[::2], 2, axis=0), strict=True)):
        other, share, expected = i ^ 1, numbers[0], images[i].copy()  # Beta(1, 1) is uniform
        if alphas[1] and not (alphas[0] and numbers[3] >= 0.5):
            lengths = [int(size * math.sqrt(1 - share)) for size in (12, 16)]
            rows, columns = (
                slice(max(int(size * number) - length // 2, 0), int(size * number) + (length + 1) // 2)
                for size, number, length in zip((12, 16), numbers[1:3], lengths, strict=True)
            )
            expected[rows, columns] = images[other][rows, columns]
            share = 1 - expected[rows, columns][..., 0].size / (12 * 16)
        else:
            expected = share * images[i] + (1 - share) * images[other]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
        soft[i, labels[i]] += share * weights[i]
        soft[i, labels[other]] += (1 - share) * weights[other]
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(loss, -np.mean(np.sum(soft * logs, axis=1)), rtol=1e-6)
    whole = images.astype(np.uint8)
    of_whole = values.of(
        lambda: augmentation.mixed(tf.constant(whole), tf.constant(labels), values.GivenDraws(NUMBERS), alphas)[0]
    )
    np.testing.assert_array_equal(of_whole, pixels)
