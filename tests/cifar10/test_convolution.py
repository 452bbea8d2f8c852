"""The convolution in few products against tf.nn.conv2d and numpy."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convolution import convolution, fourier, toom_cook

v1 = tf.compat.v1


def direct(inputs, weights):
    return tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")


def run(convolve, inputs, weights, output_gradients):
    """[outputs, gradients with respect to inputs and weights]; the batch size is not known statically."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(inputs.dtype, [None, *inputs.shape[1:]])
        w = tf.constant(weights)
        y = convolve(x, w)
        assert y.shape.as_list() == [None, *output_gradients.shape[1:]]
        return session.run([y, *tf.gradients(y, [x, w], grad_ys=tf.constant(output_gradients))], {x: inputs})


def draw(batch, height, width, channels, filters, taps, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = [batch, height, width, channels], [*taps, channels, filters], [batch, height, width, filters]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("method", [fourier, toom_cook])
@pytest.mark.parametrize("taps", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("size", [1, 2, 7, 12, 25])
def test_three_matrices_filter_a_sequence(method, size, taps):
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=size), rng.normal(size=taps)
    of_x, of_g, to_y = method(size, taps)
    expected = np.correlate(np.pad(x, taps // 2), g, "valid")
    products = (of_x @ x) * (of_g @ g)[:, np.newaxis]
    np.testing.assert_allclose(np.tensordot(to_y, products), expected, atol=1e-11)


@pytest.mark.parametrize("method, products", [(fourier, 23), (toom_cook, 20)])
def test_products_of_twelve_rows_and_five_taps(method, products):
    of_x, of_g, _ = method(12, 5)
    assert of_x.shape[0] * of_x.shape[1] == products
    assert len(of_g) == len(of_x)


@pytest.mark.parametrize(
    "shape", [(3, 12, 12, 8, 6, (5, 5)), (2, 7, 4, 3, 2, (3, 5)), (1, 1, 3, 2, 2, (5, 1)), (2, 25, 9, 2, 3, (9, 7))]
)
def test_values_and_gradients_equal_the_direct_convolution(shape):
    tensors = draw(*shape)
    for result, expected in zip(run(convolution, *tensors), run(direct, *tensors), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-9)


def error(results, exact):
    """Root mean square of the errors over that of the values, for outputs and gradients."""
    errors = [np.square(r.astype(float) - e).mean() / np.square(e).mean() for r, e in zip(results, exact, strict=True)]
    return np.sqrt(errors)


def test_float32_errs_far_less_than_what_a_gpu_uses_by_default():
    tensors = draw(4, 12, 12, 64, 64, (5, 5), np.float32)
    exact = run(direct, *(tensor.astype(float) for tensor in tensors))
    assert (error(run(convolution, *tensors), exact) < 5e-5).all()


def test_bfloat16_errs_by_about_one_rounding():
    tensors = [tensor.astype(tf.bfloat16.as_numpy_dtype) for tensor in draw(4, 12, 12, 64, 64, (5, 5))]
    exact = run(direct, *(tensor.astype(float) for tensor in tensors))
    assert (error(run(convolution, *tensors), exact) < 2**-7).all()


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 0), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 3, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
