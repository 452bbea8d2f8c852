"""Augmentation and preparation against the published steps, one by one in numpy."""

import numpy as np
import pytest
import tensorflow as tf
from draws import GivenDraws

from cifar10 import augment

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def augmented():
    """(images, numbers drawn) -> augmented images; the batch size is not known statically."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, u = v1.placeholder(tf.uint8, [None, 32, 32, 3]), v1.placeholder(tf.float32, [None, 4])
        y = augment.augment(x, GivenDraws(u))
        assert y.shape.as_list() == [None, 24, 24, 3] and y.dtype == tf.float32
        yield lambda images, numbers: session.run(y, {x: images, u: numbers})


@pytest.fixture(scope="module")
def prepared():
    """images -> prepared images."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.uint8, [None, 32, 32, 3])
        y = augment.prepare(x)
        assert y.shape.as_list() == [None, 24, 24, 3] and y.dtype == tf.float32
        yield lambda images: session.run(y, {x: images})


def standardized(image):
    return (image - image.mean()) / max(image.std(), 1 / np.sqrt(image.size))


def published(images, numbers, brightness=0.0):
    """Crop, flip, brightness, contrast and standardisation in float64, image by image."""
    results = []
    for image, (row, column, flip, contrast) in zip(images.astype(float), numbers.astype(float), strict=True):
        top, left = int(9 * row), int(9 * column)
        image = image[top : top + 24, left : left + 24]
        if flip < 0.5:
            image = image[:, ::-1]
        image = image + brightness
        means = image.mean(axis=(0, 1))
        image = (image - means) * (0.2 + 1.6 * contrast) + means
        results.append(standardized(image))
    return np.array(results)


def draw(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, [count, 32, 32, 3], np.uint8), rng.random([count, 4], np.float32)


def all_places():
    """The numbers of every crop, flipped and not; of the least and greatest draw; and of twenty others."""
    rows, columns, flips = np.meshgrid(np.arange(9), np.arange(9), [0.25, 0.75], indexing="ij")
    numbers = np.stack([(rows + 0.5) / 9, (columns + 0.5) / 9, flips, np.full(rows.shape, 0.5)], axis=-1)
    return np.concatenate([numbers.reshape(-1, 4), np.zeros([1, 4]), np.full([1, 4], 1 - 2**-24), draw(20)[1]])


@pytest.mark.parametrize("brightness", [-63.0, 0.0, 63.0])
def test_equals_the_published_steps_whatever_the_brightness(augmented, brightness):
    numbers = all_places().astype(np.float32)
    images, _ = draw(len(numbers))
    np.testing.assert_allclose(augmented(images, numbers), published(images, numbers, brightness), atol=3e-6)


def test_constant_images_become_zero(augmented, prepared):
    _, numbers = draw(3)
    images = np.stack([np.full([32, 32, 3], value, np.uint8) for value in (0, 77, 255)])
    assert not augmented(images, numbers).any()
    assert not prepared(images).any()


def test_the_deviation_of_nearly_constant_images_is_bounded(augmented):
    _, numbers = draw(2)
    numbers[:, 3] = 0.1  # a contrast of 0.36
    images = np.full([2, 32, 32, 3], 200, np.uint8)
    images[:, 16, 16, 1] = [201, 204]  # in every crop; deviations 0.36 / 41.6 and 1.44 / 41.6, the bound is 1 / 41.6
    result, expected = augmented(images, numbers), published(images, numbers)
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(result.std(axis=(1, 2, 3)), [0.36, 1.0], rtol=1e-2)


def test_an_image_comes_out_the_same_to_the_last_bit_in_any_batch(augmented, prepared):
    images, numbers = draw(256)
    whole, whole_prepared = augmented(images, numbers), prepared(images)
    for size in (128, 8, 3, 1):
        for first in range(0, 256, size):
            part = slice(first, first + size)
            np.testing.assert_array_equal(augmented(images[part], numbers[part]), whole[part])
            np.testing.assert_array_equal(prepared(images[part]), whole_prepared[part])


def test_preparation_is_the_standardised_central_crop(prepared):
    images, _ = draw(5, seed=1)
    expected = [standardized(image[4:28, 4:28].astype(float)) for image in images]
    np.testing.assert_allclose(prepared(images), expected, atol=3e-6)
