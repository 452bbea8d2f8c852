"""Augmentation and preparation, the tutorial's and those of the deeper networks, against numpy step by step."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import values

from cifar10 import augment, crops, shifts

v1 = tf.compat.v1
LEAST, MOST = 0, 1 - 2**-24  # the numbers that are drawn


@pytest.fixture(scope="module")
def made():
    """(images, numbers drawn) -> augmented and prepared images; the batch size is not known statically."""
    with tf.Graph().as_default() as graph:
        x, u = v1.placeholder(tf.uint8, [None, 32, 32, 3]), v1.placeholder(tf.float32, [None, 4])
        results = augment.augment(x, values.GivenDraws(u)), augment.prepare(x)
        assert all(y.shape.as_list() == [None, 24, 24, 3] and y.dtype == tf.float32 for y in results)
    session = v1.Session(graph=graph)
    return lambda images, numbers: session.run(results, {x: images, u: numbers})


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
    return np.concatenate([numbers.reshape(-1, 4), np.full([1, 4], LEAST), np.full([1, 4], MOST), draw(20)[1]])


@pytest.mark.parametrize("brightness", [-63.0, 0.0, 63.0])
def test_equals_the_published_steps_whatever_the_brightness(made, brightness):
    numbers = all_places().astype(np.float32)
    images, _ = draw(len(numbers))
    augmented, prepared = made(images, numbers)
    np.testing.assert_allclose(augmented, published(images, numbers, brightness), atol=3e-6)
    central = [standardized(image[4:28, 4:28].astype(float)) for image in images]
    np.testing.assert_allclose(prepared, central, atol=3e-6)


def test_the_deviation_of_constant_and_nearly_constant_images_is_bounded(made):
    numbers = draw(5)[1]
    numbers[:, 3] = 0.1  # a contrast of 0.36
    images = np.zeros([5, 32, 32, 3], np.uint8) + np.uint8([0, 77, 255, 200, 200])[:, None, None, None]
    images[3:, 16, 16, 1] = [201, 204]  # in every crop; deviations 0.36 / 41.6 and 1.44 / 41.6, the bound is 1 / 41.6
    augmented, prepared = made(images, numbers)
    np.testing.assert_allclose(augmented, published(images, numbers), atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(augmented.std(axis=(1, 2, 3)), [0, 0, 0, 0.36, 1.0], rtol=1e-2)
    assert not augmented[:3].any() and not prepared[:3].any()


def test_an_image_comes_out_the_same_to_the_last_bit_in_any_batch(made):
    images, numbers = draw(256)
    whole = made(images, numbers)
    for size in (128, 8, 3, 1):
        for first in range(0, 256, size):
            part = slice(first, first + size)
            for found, expected in zip(made(images[part], numbers[part]), whole, strict=True):
                np.testing.assert_array_equal(found, expected[part])


IMAGES = draw(2)[0]


def test_crops_are_those_of_the_padded_image():
    """All 81 places, flipped and not, and the least and greatest numbers, against numpy."""
    places = [(row, column, flip, k) for row in range(9) for column in range(9) for flip in (0, 1) for k in (0, 1)]
    numbers = [((row + 0.5) / 9, (column + 0.5) / 9, 0.75 - 0.5 * flip) for row, column, flip, _ in places]
    places, numbers = [*places, (0, 0, 1, 0), (8, 8, 0, 1)], [*numbers, (LEAST,) * 3, (MOST,) * 3]
    found = values.of(lambda x: crops.augment(x, values.GivenDraws(numbers)), IMAGES[[k for *_, k in places]])
    normal = (IMAGES.astype(np.float64) - crops.MEAN) / crops.DEVIATION
    padded = np.pad(normal, [(0, 0), (4, 4), (4, 4), (0, 0)])
    for crop, (row, column, flip, k) in zip(found, places, strict=True):
        expected = padded[k, row : row + 32, column : column + 32]
        np.testing.assert_allclose(crop, expected[:, ::-1] if flip else expected, atol=1e-5, err_msg=f"{row} {column}")


@pytest.mark.parametrize("augment, most, square", [(shifts.augment, 2, 0), (shifts.augment_with_cutout, 4, 12)])
def test_every_shift_flip_and_square_is_numpys(augment, most, square):
    """All 25 or 81 shifts, flipped and not, in an even and in an odd epoch; and the least and greatest numbers."""
    places = [(i, (i + 0.5) / (2 * most + 1)) for i in range(2 * most + 1)]
    cases = [
        *itertools.product(places, places, (0, 1), (6, 7), (0, 1)),
        *(((i, number), (i, number), 0, 6, 0) for i, number in ((0, LEAST), (2 * most, MOST))),
    ]
    rows, columns, bits, epochs, chosen = map(np.array, zip(*cases, strict=True))
    numbers = np.stack([rows[:, 1], columns[:, 1]], axis=1)
    of_square = numbers[::-1]
    given = dict(shift=numbers, colours=numbers, cutout=of_square), (0.75 - 0.5 * bits)[:, np.newaxis], epochs
    found = values.of(lambda x: augment(x, values.GivenDraws(*given)), IMAGES[chosen])
    assert found.dtype == np.float32
    padded = np.pad(IMAGES, [(0, 0), (most, most), (most, most), (0, 0)], mode="reflect").astype(np.float64)
    for shifted, ((row, first), (column, second), bit, epoch, k), corner in zip(found, cases, of_square, strict=True):
        expected = (padded[k, row : row + 32, column : column + 32] - crops.MEAN) / crops.DEVIATION
        expected = expected[:, ::-1] if (bit + epoch) % 2 else expected
        expected = (expected + 0.1399 * (2 * first - 1)) * (1 + 0.1308 * (2 * second - 1))
        top, left = ((33 - square) * corner).astype(int)
        expected[top : top + square, left : left + square] = 0
        np.testing.assert_allclose(shifted, expected, atol=1e-5, err_msg=f"{row} {column} {bit} {epoch}")


def test_the_six_views_are_numpys():
    plain = values.of(crops.prepare, IMAGES)
    weights, found = zip(*shifts.views(tf.constant(plain)), strict=True)
    padded = np.pad(plain, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    moved = [padded[:, first : first + 32, first : first + 32] for first in (1, 2, 0)]
    assert weights == (1 / 4, 1 / 8, 1 / 8) * 2
    for view, expected in zip(found, moved + [image[:, :, ::-1] for image in moved], strict=True):
        np.testing.assert_array_equal(view, expected)


def test_a_doubt_is_a_small_difference_of_the_two_largest_probabilities():
    logits = np.log([[0.84, 0.15, 0.01], [0.01, 0.86, 0.13], [0.1, 0.8, 0.1]])
    assert values.of(shifts.unsure, logits).tolist() == [True, False, False]
