"""The convolution in few products against tf.nn.conv2d and numpy."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convolution import DIRECT, SPECTRA, convolution, transforms
from tower_train.graph import context

v1 = tf.compat.v1
BFLOAT16 = tf.bfloat16.as_numpy_dtype


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


def by(name, pixels_first=False, usual=SPECTRA):
    """The convolution by one algorithm."""

    def convolve(x, w):
        with context.entered(context.Context(choose=lambda site, algorithms, trial: name)):
            if not pixels_first:
                return convolution(x, w, usual=usual)
            return tf.transpose(convolution(tf.transpose(x, [1, 2, 0, 3]), w, True, usual), [2, 0, 1, 3])

    return convolve


@pytest.mark.parametrize("dtype, most", [(np.float64, 1e-12), (np.float32, 1e-6), (BFLOAT16, 2**-8)])
def test_every_algorithm_has_the_same_outputs_and_gradients(dtype, most):
    """As numpy computes them: sums over taps of products between channels and filters. In bfloat16 spectra are rounded
    a few times, the others once."""
    x, w, upstream = draw(4, 6, 5, 16, 24, (3, 5), dtype)
    wide, outer, of_x, of_w, y = x.astype(float), upstream.astype(float), 0, np.zeros(w.shape), 0
    padded = np.pad(wide, [(0, 0), (1, 1), (2, 2), (0, 0)])
    of_padded = np.zeros(padded.shape)
    for i, j in np.ndindex(3, 5):
        window = np.s_[:, i : i + 6, j : j + 5]
        y += padded[window] @ w[i, j].astype(float)
        of_padded[window] += outer @ w[i, j].astype(float).T
        of_w[i, j] = np.einsum("bhwc,bhwf->cf", padded[window], outer)
    of_x = of_padded[:, 1:-1, 2:-2]
    found = []
    choose = lambda site, algorithms, trial: found.extend(algorithms) or next(iter(algorithms))  # noqa: E731
    with tf.Graph().as_default(), context.entered(context.Context(choose=choose)):
        convolution(tf.constant(x), tf.constant(w))
    assert found == [SPECTRA, DIRECT] + ["spectra_float32", "direct_float32"] * (dtype == BFLOAT16)
    for name in found:
        for pixels_first in (False, True):
            results = run(by(name, pixels_first), x, w, upstream)
            rounded_often = name == SPECTRA and dtype == BFLOAT16
            assert (error(results, (y, of_x, of_w)) < (2**-6 if rounded_often else most)).all(), name


@pytest.mark.parametrize("dtype, algorithms", [(tf.float32, None), (tf.bfloat16, [DIRECT, "direct_float32"])])
def test_few_channels_need_no_trial_of_spectra(dtype, algorithms):
    asked = []
    with tf.Graph().as_default(), context.entered(context.Context(choose=lambda *about: asked.append(about) or DIRECT)):
        images = tf.zeros([1000, 24, 24, 3], dtype)
        convolution(images, tf.zeros([5, 5, 3, 64], dtype), usual=DIRECT, of_images=True)
    if algorithms is None:
        assert not asked
        return
    [(site, found, trial)] = asked
    assert site == "conv5x5:24x24x3x64" and list(found) == algorithms
    examples = 2 * 10**9 // (2 * 24 * 24 * 3 * 64 * 25)
    assert trial == (((examples, 24, 24, 3), (5, 5, 3, 64)), dtype, (False, True))


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 0), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 3, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
