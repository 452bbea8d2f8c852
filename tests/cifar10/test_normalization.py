"""Local response normalisation against its definition and against tf.nn.lrn."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convnet import local_response_normalization

v1 = tf.compat.v1


def run(normalize, inputs, output_gradients):
    """[outputs, gradients with respect to inputs] of `normalize`, whose batch size is not known statically."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(inputs.dtype, [None, *inputs.shape[1:]])
        y = normalize(x)
        dx = tf.gradients(y, x, grad_ys=tf.constant(output_gradients))[0]
        assert y.dtype == x.dtype and y.shape.as_list() == x.shape.as_list()
        return session.run([y, dx], {x: inputs})


def plain(x, dy):
    """The definition in numpy, and its gradient through the whole Jacobian: x and dy are [examples, channels]."""
    distances = np.abs(np.subtract.outer(np.arange(x.shape[1]), np.arange(x.shape[1])))
    near, alpha = (distances <= 4).astype(float), 0.001 / 9
    energy = 1 + alpha * np.square(x) @ near
    jacobian = np.einsum("nc,ck->nck", energy**-0.75, np.eye(x.shape[1]))
    jacobian -= 1.5 * alpha * np.einsum("nc,nk,ck->nck", x * energy**-1.75, x, near)
    return x * energy**-0.75, np.einsum("nc,nck->nk", dy, jacobian)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("shape", [(3, 2, 4, 64), (5, 7, 16), (2, 3, 1, 3)])
def test_values_and_gradients_follow_the_definition(shape, scale):
    rng = np.random.default_rng(0)
    x, dy = scale * rng.normal(size=shape), rng.normal(size=shape)
    y, dx = run(local_response_normalization, x, dy)
    rows = [-1, shape[-1]]
    plain_y, plain_dx = plain(x.reshape(rows), dy.reshape(rows))
    np.testing.assert_allclose(y.reshape(rows), plain_y, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx.reshape(rows), plain_dx, rtol=1e-9, atol=1e-12)


def test_equals_tensorflows_own_with_the_tutorials_parameters():
    rng = np.random.default_rng(1)
    x = (50 * rng.normal(size=[4, 6, 5, 64])).astype(np.float32)
    dy = rng.normal(size=x.shape).astype(np.float32)
    ours = run(local_response_normalization, x, dy)
    tensorflows = run(lambda x: tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75), x, dy)
    for our_result, result in zip(ours, tensorflows, strict=True):
        np.testing.assert_allclose(our_result, result, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_normalised_in_float32():
    bfloat16 = tf.bfloat16.as_numpy_dtype
    x = (100 * np.random.default_rng(2).normal(size=[8, 64])).astype(bfloat16)
    y, _ = run(local_response_normalization, x, np.ones_like(x))
    expected, _ = plain(x.astype(float), np.ones(x.shape))
    np.testing.assert_allclose(y.astype(float), expected, rtol=2**-8)  # one rounding, of the result
