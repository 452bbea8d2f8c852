"""The reference network's initial values, its convolution in few products against
tf.nn.conv2d; sizes of the others. tests/graph/test_equivalence.py trains it beside one of plain operations."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import values

import cifar10
from cifar10 import convnet
from cifar10.convolution import Algorithm, convolution, fastest
from tower_train import host

v1 = tf.compat.v1

BIASES = {"conv1": 0.0, "conv2": 0.1, "local3": 0.1, "local4": 0.1, "softmax_linear": 0.0}
DEVIATIONS = {"conv1": 5e-2, "conv2": 5e-2, "local3": 0.04, "local4": 0.04, "softmax_linear": 1 / 192}


def test_initial_values():
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(1)
        convnet.inference(tf.zeros([1, 24, 24, 3]), True)
        session.run(v1.global_variables_initializer())
        drawn = session.run({variable.op.name: variable for variable in v1.global_variables()})
    for layer, bias in BIASES.items():
        weights, deviation = drawn[f"{layer}/weights"], DEVIATIONS[layer]
        np.testing.assert_array_equal(drawn[f"{layer}/biases"], np.float32(bias))
        assert abs(weights).max() <= 2 * deviation
        # A normal distribution cut off at two deviations has 0.8796 of its deviation.
        np.testing.assert_allclose(weights.std(), 0.8796 * deviation, rtol=0.05)  # 5 deviations of 4,800: 6e-7 of seeds


def test_bfloat16_is_normalised_in_float32():
    x = (100 * np.random.default_rng(2).normal(size=[8, 1, 1, 64])).astype(tf.bfloat16.as_numpy_dtype)
    near = np.abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 4
    wide = x.astype(float)
    expected = wide * (1 + 0.001 / 9 * np.square(wide) @ near) ** -0.75
    found = values.of(convnet.local_response_normalization, x)
    np.testing.assert_allclose(found.astype(float), expected, rtol=2**-8)  # one rounding, of the result


# Weights and biases. ResNet-20: 0.27 million in He et al. 2015, table 6. The Keras tutorial's MiniGoogLeNet has
# 1,656,250, which counts a bias and two moving statistics for each of 1,712 normalised channels.
PARAMETERS = {"resnet20": 269_722, "minigooglenet": 1_656_250 - 3 * 1_712}


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_published_size(name):
    with tf.Graph().as_default():
        network = cifar10.WORKLOAD.with_options({"model": name}).inference
        logits = network(tf.zeros([2, 32, 32, 3]), True)
        count = sum(np.prod(variable.shape.as_list()) for variable in v1.trainable_variables())
        layers = [v for v in v1.trainable_variables() if v.op.name.endswith("/weights")]
    assert logits.shape == (2, 10)
    assert count == PARAMETERS[name]
    assert not name.startswith("resnet") or len(layers) == int(name.removeprefix("resnet"))


BFLOAT16 = tf.bfloat16.as_numpy_dtype
SPECTRA, DIRECT = Algorithm(by_spectra=True), Algorithm(by_spectra=False)
JOINED = Algorithm(by_spectra=False, joins=True)


def run(convolve, inputs, weights, output_gradients):
    """[outputs, gradients with respect to inputs and weights]; the batch size is not known statically."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, w = v1.placeholder(inputs.dtype, [None, *inputs.shape[1:]]), tf.constant(weights)
        y = convolve(x, w)
        assert y.shape.as_list() == [None, *output_gradients.shape[1:]]
        return session.run([y, *tf.gradients(y, [x, w], grad_ys=tf.constant(output_gradients))], {x: inputs})


def pixels_first(x, w, algorithm):
    return tf.transpose(convolution(tf.transpose(x, [1, 2, 0, 3]), w, True, algorithm), [2, 0, 1, 3])


def draw(batch, height, width, channels, filters, taps, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = [batch, height, width, channels], [*taps, channels, filters], [batch, height, width, filters]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (np.float64, (3, 12, 12, 8, 6, (5, 5))),
        (np.float64, (1, 1, 3, 2, 2, (5, 1))),
        (np.float64, (2, 25, 9, 2, 3, (9, 7))),
        (np.float64, (1, 2, 3, 2, 2, (7, 9))),
        (np.float32, (4, 6, 5, 16, 24, (3, 5))),
        (BFLOAT16, (4, 6, 5, 16, 24, (3, 5))),
    ],
)
def test_every_algorithm_has_the_direct_convolutions_outputs_and_gradients(dtype, shape):
    """As TensorFlow computes them in float64. In bfloat16 spectra are rounded a few times, sums too without oneDNN."""
    tensors = draw(*shape, dtype)
    wide = [tensor.astype(np.float64) for tensor in tensors]
    expected = run(lambda x, w: tf.nn.conv2d(x, w, strides=1, padding="SAME"), *wide)
    most = {np.float64: 1e-12, np.float32: 1e-6, BFLOAT16: 2**-8}[dtype]
    in_float32 = [each._replace(in_float32=True) for each in (SPECTRA, DIRECT)] if dtype == BFLOAT16 else []
    for algorithm in (SPECTRA, DIRECT, *in_float32):
        for convolve in (convolution, pixels_first) if dtype == np.float64 else (convolution,):
            results = run(functools.partial(convolve, algorithm=algorithm), *tensors)
            for found, exact in zip(results, expected, strict=True):
                error = np.sqrt(np.square(found.astype(float) - exact).mean() / np.square(exact).mean())
                rounded_often = dtype == BFLOAT16 and not algorithm.in_float32
                assert error < (2**-5 if rounded_often else most), algorithm


SEVERAL = 9, 7, 15


@pytest.mark.parametrize(
    "batch, size, joined, sizes",
    [(6, 9, 3, ()), (6, 9, 3, SEVERAL), (8, 7, 4, SEVERAL), (7, 9, 1, SEVERAL), (None, 9, 1, ()), (6, 15, 1, SEVERAL)],
)
def test_images_side_by_side_have_the_same_gradient(batch, size, joined, sizes):
    """As many of a batch as divide it and fit into a row of 32 pixels: three of 9, four of 7, and a gap each."""
    tensors = draw(batch or 5, size, size, 4, 6, (3, 3))
    shape = [batch, *([None, None] if sizes else [size, size]), 4]
    expected = run(lambda x, w: tf.nn.conv2d(x, w, strides=1, padding="SAME"), *tensors)
    with tf.Graph().as_default(), v1.Session() as session:
        x, w = v1.placeholder(tf.float64, shape), tf.constant(tensors[1])
        y = convolution(x, w, algorithm=JOINED, sizes=sizes)
        gradients = tf.gradients(y, [x, w], grad_ys=tf.constant(tensors[2]))
        traced, stats = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), v1.RunMetadata()
        found = session.run([y, *gradients], {x: tensors[0]}, options=traced, run_metadata=stats)
    made = [each for device in stats.step_stats.dev_stats for node in device.node_stats for each in node.output]
    shapes = [[dim.size for dim in each.tensor_description.shape.dim] for each in made]
    wide = [shape[2] for shape in shapes if len(shape) == 4 and shape[3] == 4 and shape[2] > size]
    assert set(wide) == ({joined * (size + 1)} if joined > 1 else set())
    for each, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, exact, rtol=0, atol=1e-12 * np.abs(exact).max())


def test_dtype_and_processor_name_the_algorithm(tmp_path, monkeypatch):
    """Few channels are not worth the transforms."""
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    for dtype, flags, algorithm in (
        ("float32", "amx_bf16", SPECTRA),
        ("float64", "", SPECTRA),
        ("float16", "", Algorithm(True, in_float32=True)),
        ("bfloat16", "avx512_bf16 amx_bf16", JOINED),
        ("bfloat16", "avx512_bf16", SPECTRA),
        ("bfloat16", "avx512f", Algorithm(True, in_float32=True)),
    ):
        host.CPUINFO.write_text(f"flags : fpu {flags}\n")
        assert fastest(tf.as_dtype(dtype), 64) == algorithm, (dtype, flags)
        assert fastest(tf.as_dtype(dtype), 24) == algorithm._replace(by_spectra=False)


@pytest.mark.parametrize("device, convolutions", [("/cpu:0", 0), ("/gpu:1", 1)])
def test_a_gpu_gets_the_library_convolution(device, convolutions):
    with tf.Graph().as_default() as graph, tf.device(device):
        x, w, _ = (tf.identity(tensor) for tensor in draw(2, 12, 12, 64, 4, (5, 5)))
        convolution(x, w)
        assert [op.type for op in graph.get_operations()].count("Conv2D") == convolutions
