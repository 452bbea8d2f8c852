"""Shifts are those of the reflected image, and each image is flipped in every other epoch."""

import numpy as np
import pytest
import tensorflow as tf
import values
from draws import GivenDraws

from cifar10 import crops, shifts


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, [2, 32, 32, 3], np.uint8)


def test_every_shift_and_flip_is_numpys(images):
    """All 25 places, flipped and not, in an even and in an odd epoch."""
    cases = [(r, c, bit, epoch, k) for r in range(5) for c in range(5) for bit in (0, 1) for epoch in (6, 7)
             for k in (0, 1)]  # fmt: skip
    rows, columns, bits, epochs, chosen = map(np.array, zip(*cases, strict=True))
    numbers = np.stack([rows + 0.5, columns + 0.5], axis=1) / 5  # those of the shift, and of the colours too
    given = numbers, (0.75 - 0.5 * bits)[:, np.newaxis], epochs
    found = values.of(lambda x: shifts.augment(x, GivenDraws(*given)), images[chosen])
    assert found.dtype == np.float32
    padded = np.pad(images, [(0, 0), (2, 2), (2, 2), (0, 0)], mode="reflect").astype(np.float64)
    for shifted, (row, column, bit, epoch, k) in zip(found, cases, strict=True):
        expected = (padded[k, row : row + 32, column : column + 32] - crops.MEAN) / crops.DEVIATION
        if (bit + epoch) % 2:
            expected = expected[:, ::-1]
        brightness, contrast = 0.1399 * (row / 2.5 - 0.8), 1 + 0.1308 * (column / 2.5 - 0.8)
        expected = (expected + brightness) * contrast
        np.testing.assert_allclose(shifted, expected, atol=1e-5, err_msg=f"{row} {column} {bit} {epoch}")


def test_the_extreme_numbers_give_the_extreme_shifts_and_colours(images):
    given = [[0, 0], [1 - 2**-24] * 2], [[0.5], [0.5]], [0, 0]
    found, plain = values.of(lambda x: (shifts.augment(x, GivenDraws(*given)), crops.prepare(x)), images)
    np.testing.assert_allclose(found[0, 2:, 2:], (plain[0, :30, :30] - 0.1399) * (1 - 0.1308), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1, :30, :30], (plain[1, 2:, 2:] + 0.1399) * (1 + 0.1308), rtol=1e-5, atol=1e-6)


def test_the_six_views_are_numpys(images):
    plain = values.of(crops.prepare, images)
    weights, found = zip(*shifts.views(tf.constant(plain)), strict=True)
    padded = np.pad(plain, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    moved = [padded[:, first : first + 32, first : first + 32] for first in (1, 2, 0)]
    assert weights == (1 / 4, 1 / 8, 1 / 8) * 2
    for view, expected in zip(found, moved + [image[:, :, ::-1] for image in moved], strict=True):
        np.testing.assert_array_equal(view, expected)
