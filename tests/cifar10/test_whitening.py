"""A convolution with the whitening kernels gives channels that are uncorrelated and of variance nearly one."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import crops, whitening

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def images():
    """Smooth coloured images, 700 of 9 x 8: pixels and channels are correlated, and none is constant."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=[700, 10, 9, 3])
    smooth = noise[:, 1:, 1:] + noise[:, :-1, 1:] + noise[:, 1:, :-1]
    return np.clip(120 + 30 * (smooth + smooth.mean(axis=-1, keepdims=True)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def kernels(images):
    return whitening.kernels(images)


def all_patches(images):
    """[patches, 12] of normalised images, one by one."""
    normal = (images.astype(np.float64) - crops.MEAN) / crops.DEVIATION
    return np.array([normal[:, r : r + 2, c : c + 2].reshape(len(normal), 12) for r in range(8) for c in range(7)])


def test_whitened_patches_are_uncorrelated_and_of_variance_nearly_one(images, kernels):
    """eigenvalue / (eigenvalue + epsilon), by TensorFlow's convolution."""
    with tf.Graph().as_default(), v1.Session() as session:
        normal = (tf.cast(images, tf.float32) - crops.MEAN) / crops.DEVIATION
        found = session.run(tf.nn.conv2d(normal, kernels[..., :12], 1, "VALID"))
    assert found.shape == (700, 8, 7, 12)
    eigenvalues = np.linalg.eigvalsh(np.cov(all_patches(images).reshape(-1, 12), rowvar=False))[::-1]
    assert eigenvalues[-1] < 0.5 * eigenvalues[0]
    expected = np.diag(eigenvalues / (eigenvalues + 5e-4))
    np.testing.assert_allclose(np.cov(found.reshape(-1, 12), rowvar=False), expected, atol=1e-3)
    np.testing.assert_allclose(expected, np.eye(12), atol=0.05)


def test_the_greatest_eigenvalue_comes_first_directions_are_fixed_and_the_second_half_is_their_negative(kernels):
    assert kernels.shape == (2, 2, 3, 24) and kernels.dtype == np.float32
    np.testing.assert_array_equal(kernels[..., 12:], -kernels[..., :12])
    rows = kernels[..., :12].reshape(12, 12).T
    norms = np.linalg.norm(rows, axis=1)  # 1 / sqrt(eigenvalue + epsilon)
    assert (np.diff(norms) > 0).all()
    assert (rows[np.arange(12), np.abs(rows).argmax(axis=1)] > 0).all()


def test_the_bits_do_not_depend_on_the_order_of_the_images(images, kernels):
    assert whitening.kernels(images[::-1]).tobytes() == kernels.tobytes()
