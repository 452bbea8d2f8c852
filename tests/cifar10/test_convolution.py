"""The convolution in few products against tf.nn.conv2d."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.convolution import Algorithm, convolution, fastest
from tower_train import host

v1 = tf.compat.v1
BFLOAT16 = tf.bfloat16.as_numpy_dtype
SPECTRA, DIRECT = Algorithm(by_spectra=True), Algorithm(by_spectra=False)


def by(algorithm, pixels_first=False):
    """The convolution by one algorithm."""

    def convolve(x, w):
        if not pixels_first:
            return convolution(x, w, algorithm=algorithm)
        return tf.transpose(convolution(tf.transpose(x, [1, 2, 0, 3]), w, True, algorithm), [2, 0, 1, 3])

    return convolve


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


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (np.float64, (3, 12, 12, 8, 6, (5, 5))), (np.float64, (2, 7, 4, 3, 2, (3, 5))),
        (np.float64, (1, 1, 3, 2, 2, (5, 1))), (np.float64, (2, 25, 9, 2, 3, (9, 7))),
        (np.float64, (2, 2, 1, 2, 2, (1, 1))), (np.float64, (1, 2, 3, 2, 2, (7, 9))),
        (np.float32, (4, 6, 5, 16, 24, (3, 5))), (BFLOAT16, (4, 6, 5, 16, 24, (3, 5))),
    ],
)  # fmt: skip
def test_every_algorithm_has_the_direct_convolutions_outputs_and_gradients(dtype, shape):
    """As TensorFlow computes them in float64. In bfloat16 spectra are rounded a few times, the others once."""
    tensors = draw(*shape, dtype)
    wide = [tensor.astype(np.float64) for tensor in tensors]
    expected = run(lambda x, w: tf.nn.conv2d(x, w, strides=1, padding="SAME"), *wide)
    most = {np.float64: 1e-12, np.float32: 1e-6, BFLOAT16: 2**-8}[dtype]
    in_float32 = [each._replace(in_float32=True) for each in (SPECTRA, DIRECT)] if dtype == BFLOAT16 else []
    for algorithm in (SPECTRA, DIRECT, *in_float32):
        for pixels_first in (False, True):
            for found, exact in zip(run(by(algorithm, pixels_first), *tensors), expected, strict=True):
                error = np.sqrt(np.square(found.astype(float) - exact).mean() / np.square(exact).mean())
                rounded_often = algorithm == SPECTRA and dtype == BFLOAT16
                assert error < (2**-6 if rounded_often else most), algorithm


@pytest.mark.parametrize(
    ("dtype", "flags", "algorithm"),
    [
        ("float32", "amx_bf16", SPECTRA), ("float64", "", SPECTRA), ("float16", "", Algorithm(True, in_float32=True)),
        ("bfloat16", "avx512_bf16 amx_bf16", DIRECT), ("bfloat16", "avx512_bf16", SPECTRA),
        ("bfloat16", "avx512f", Algorithm(True, in_float32=True)),
    ],
)  # fmt: skip
def test_dtype_and_processor_name_the_algorithm(dtype, flags, algorithm, tmp_path, monkeypatch):
    """Few channels are not worth the transforms."""
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    host.CPUINFO.write_text(f"flags : fpu {flags}\n")
    assert fastest(tf.as_dtype(dtype), 64) == algorithm
    assert fastest(tf.as_dtype(dtype), 24) == algorithm._replace(by_spectra=False)


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 0), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 64, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
