"""The convolution in few products against tf.nn.conv2d and numpy."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convolution import convolution, transforms

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


@pytest.mark.parametrize("sizes, taps, products", [((7, 7), (3, 3), 94), ((12, 12), (5, 5), 292), ((1, 2), (1, 3), 22)])
def test_products_of_an_image(sizes, taps, products):
    of_maps, of_kernels, to_outputs = transforms(sizes, taps)
    sequences = len(of_maps.first) // 2 - 1
    assert 2 * len(of_maps.ends) + sequences * len(of_maps.inner) == products
    assert [len(of_kernels.ends), len(of_kernels.inner)] == [len(of_maps.ends), len(of_maps.inner)]
    assert to_outputs.first.shape[0] == sizes[0]


@pytest.mark.parametrize(
    "shape",
    [
        (3, 12, 12, 8, 6, (5, 5)), (2, 7, 4, 3, 2, (3, 5)), (1, 1, 3, 2, 2, (5, 1)), (2, 25, 9, 2, 3, (9, 7)),
        (2, 3, 3, 2, 2, (3, 3)), (2, 2, 1, 2, 2, (1, 1)), (1, 2, 3, 2, 2, (7, 9)),
    ],
)  # fmt: skip
def test_values_and_gradients_equal_the_direct_convolution(shape):
    tensors = draw(*shape)
    for result, expected in zip(run(convolution, *tensors), run(direct, *tensors), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-9)


def error(results, exact):
    """Root mean square of the errors over that of the values, for outputs and gradients."""
    errors = [np.square(r.astype(float) - e).mean() / np.square(e).mean() for r, e in zip(results, exact, strict=True)]
    return np.sqrt(errors)


def test_pixels_may_come_first():
    x, w, gradients = draw(3, 7, 6, 4, 5, (3, 3))
    results = run(direct, x, w, gradients)

    def convolve(x, w):
        return tf.transpose(convolution(tf.transpose(x, [1, 2, 0, 3]), w, pixels_first=True), [2, 0, 1, 3])

    for result, expected in zip(run(convolve, x, w, gradients), results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype, most", [(np.float32, 1e-6), (tf.bfloat16.as_numpy_dtype, 2**-7), (np.float16, 2**-10)])
def test_the_error_is_about_one_rounding(dtype, most):
    tensors = draw(4, 12, 12, 64, 64, (5, 5), dtype)
    exact = run(direct, *(tensor.astype(float) for tensor in tensors))
    assert (error(run(convolution, *tensors), exact) < most).all()


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 0), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 3, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
