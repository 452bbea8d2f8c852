"""Activation and pooling against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.cifar10_94 import scaled_swish
from cifar10.convolution import max_pool

v1 = tf.compat.v1


@pytest.mark.parametrize(
    "dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.03), ("float16", 0.004)]
)
@pytest.mark.parametrize("beta", [1, 1.702])
def test_swish_and_its_derivative_are_those_of_the_sigmoid_formula(dtype, tolerance, beta):
    values = np.concatenate([np.linspace(-12, 12, 201), [-300, 300]]).astype(tf.as_dtype(dtype).as_numpy_dtype)
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant(values)
        y = scaled_swish(beta / 2 * x) / beta
        found, slope = session.run([y, *tf.gradients(y, x)])
    x = values.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-beta * x))
    np.testing.assert_allclose(found.astype(np.float64), x * sigmoid, atol=tolerance, rtol=tolerance)
    expected = sigmoid + beta * x * sigmoid * (1 - sigmoid)
    np.testing.assert_allclose(slope.astype(np.float64), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape, size", [((7, 7), 2), ((3, 3), 3), ((4, 6), 2), ((1, 5), 1)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_pools_are_the_maxima_and_the_gradient_goes_to_them(shape, size, dtype):
    maps = np.random.default_rng(0).normal(size=[*shape, 2, 3]).astype(dtype)
    rows, columns = shape[0] // size, shape[1] // size
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(dtype, [*shape, None, 3])
        y = max_pool(x, size)
        assert y.shape.as_list() == [rows, columns, None, 3]
        found, gradient = session.run([y, *tf.gradients(y, x)], {x: maps})
    windows = maps[: rows * size, : columns * size].reshape(rows, size, columns, size, 2, 3)
    expected = windows.max(axis=(1, 3))
    np.testing.assert_array_equal(found, expected)
    ones = np.zeros_like(maps)
    ones[: rows * size, : columns * size] = (windows == expected[:, np.newaxis, :, np.newaxis]).reshape(
        rows * size, columns * size, 2, 3
    )
    np.testing.assert_array_equal(gradient, ones)
