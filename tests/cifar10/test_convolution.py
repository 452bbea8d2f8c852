"""The convolution by Fourier transform against tf.nn.conv2d and numpy."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convolution import convolution, fourier_filtering

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


@pytest.mark.parametrize("taps", [1, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_three_matrices_filter_a_sequence(size, taps):
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=size), rng.normal(size=taps)
    of_x, of_g, to_y = fourier_filtering(size, taps)
    expected = np.correlate(np.pad(x, taps // 2), g, "valid")
    np.testing.assert_allclose(to_y @ ((of_x @ x) * (of_g @ g)), expected, atol=1e-13)


def test_twelve_rows_and_five_taps_take_23_products():
    assert len(fourier_filtering(12, 5)[0]) == 23


@pytest.mark.parametrize("shape", [(3, 12, 12, 8, 6, (5, 5)), (2, 7, 4, 3, 2, (3, 5)), (1, 1, 3, 2, 2, (5, 1))])
def test_values_and_gradients_equal_the_direct_convolution(shape):
    tensors = draw(*shape)
    for result, expected in zip(run(convolution, *tensors), run(direct, *tensors), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-11)


def error(results, exact):
    """Root mean square of the errors over that of the values, for outputs and gradients."""
    errors = [np.square(r.astype(float) - e).mean() / np.square(e).mean() for r, e in zip(results, exact, strict=True)]
    return np.sqrt(errors)


def test_rounding_errors_are_those_of_the_direct_convolution():
    tensors = draw(4, 12, 12, 64, 64, (5, 5), np.float32)
    exact = run(direct, *(tensor.astype(float) for tensor in tensors))
    assert (error(run(convolution, *tensors), exact) < 1e-6).all()


def test_bfloat16_errs_by_about_one_rounding():
    tensors = [tensor.astype(tf.bfloat16.as_numpy_dtype) for tensor in draw(4, 12, 12, 64, 64, (5, 5))]
    exact = run(direct, *(tensor.astype(float) for tensor in tensors))
    assert (error(run(convolution, *tensors), exact) < 2**-7).all()


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 23), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 3, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
