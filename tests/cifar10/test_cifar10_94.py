"""The networks for 94, 95 and 96 %: plain operations do the same; their whitened beginning and rates."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import trainings
import values

import cifar10
from cifar10 import cifar10_94, crops, records, whitening
from tower_train import errors, host, layers
from tower_train.graph import context
from tower_train.workload import DataRequest

v1 = tf.compat.v1

WORKLOAD = cifar10.WORKLOAD.with_options({"model": "cifar10_94"})
NARROW = dataclasses.replace(WORKLOAD, inference_for=functools.partial(cifar10_94.inference_for, widths=(32, 48, 48)))


@pytest.fixture(scope="module")
def examples(cifar10_dir):
    return WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))


def plain_network(images, weights, depth):
    """The network of Jordan 2024 in training, with SiLU: images before channels, one operation a layer. With a depth of
    3 that of airbench96, whose blocks have a third convolution and a residual connection around the last two."""

    def convolved(x, layer):
        return tf.nn.conv2d(x, weights[f"{layer}/weights"], 1, "SAME")

    def normalized(x, layer):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        beta = weights[f"{layer}/batch_normalization/beta"]
        return tf.nn.batch_normalization(x, mean, variance, beta, None, 1e-5)

    kernels, biases = (weights[f"block1/conv1/whitening/{name}"] for name in ("weights", "biases"))
    x = tf.nn.silu(1.702 * (tf.nn.conv2d(images, kernels, 1, "VALID") + biases))  # GELU's approximation, times 1.702
    for block in ("block1", "block2", "block3"):
        x = tf.nn.max_pool2d(convolved(x, f"{block}/conv1"), 2, 2, "VALID")
        first = tf.nn.silu(normalized(x, f"{block}/conv1"))
        x = tf.nn.silu(normalized(convolved(first, f"{block}/conv2"), f"{block}/conv2"))
        if depth == 3:
            x = tf.nn.silu(first + normalized(convolved(x, f"{block}/conv3"), f"{block}/conv3"))
    x = tf.reduce_max(x, [1, 2])
    return tf.matmul(x, weights["head/weights"]) / 9


# tf.image.resize computes in float32.
@pytest.mark.parametrize("on_gpu, pixels, tolerance, depth, width", [(True, 32, 1e-9, 2, 48), (False, 24, 1e-4, 3, 64)])
def test_the_network_equals_its_plain_formulation(examples, on_gpu, pixels, tolerance, depth, width, monkeypatch):
    """In the form that CPUs get and in that of GPUs, which runs here too; names and shapes of weights are the same.
    In any of several sizes, by spectra where there are 64 channels."""
    sizes = {0: pixels, 3: 32} if pixels < 32 else {0: 32}
    inference_for = functools.partial(NARROW.inference_for, sizes=sizes, depth=depth, widths=(32, width, width))
    workload = dataclasses.replace(NARROW, inference_for=inference_for)
    monkeypatch.setattr(layers, "on_gpu", lambda: on_gpu)
    images, labels = np.random.default_rng(0).normal(size=[3, 32, 32, 3]), np.arange(3)
    with tf.Graph().as_default(), v1.Session() as session:
        with context.entered(context.Context(epochs_seen=v1.placeholder_with_default(np.float64(0), []))):
            logits = workload.for_examples(examples).inference(tf.constant(images), True)
        trained = v1.trainable_variables()
        everything = {variable.op.name: variable for variable in v1.global_variables()}
        results = []
        resized = tf.cast(tf.image.resize(images, [pixels, pixels], antialias=True), tf.float64)
        plain_images = resized if pixels < 32 else tf.constant(images)
        for outputs in (logits, plain_network(plain_images, everything, depth)):
            loss = WORKLOAD.loss(outputs, tf.constant(labels))
            results.append([outputs, *tf.gradients(loss, trained)])
        session.run(v1.global_variables_initializer())
        for variable in trained:  # biases begin at 0, which would hide them
            if variable.shape.rank == 1:
                variable.load(np.random.default_rng(1).normal(size=variable.shape, scale=0.1), session)
        for ours, plain in zip(*session.run(results), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=0, atol=tolerance * np.abs(plain).max())


def test_it_begins_with_whitened_patches_which_stay_and_later_their_biases_and_filters_keep_their_norm(
    examples, cifar10_dir
):
    names = "block1/conv1/whitening/weights", "block1/conv1/whitening/biases", "block1/conv1/weights"
    options = dict(dtype="float32", global_batch_size=20, num_gpus=1, max_steps=100)  # ten steps are an epoch
    with trainings.opened(NARROW, examples, **options) as (built, session):
        first, after = trainings.snapshot(built, session), []
        for _ in range(3):
            session.run(built.report)
            ended = trainings.snapshot(built, session)
            after.append([ended[name] for name in names])
    one, two, three = after
    assert [np.array_equal(a, b) for a, b in zip(one, two, strict=True)] == [True, False, False]
    assert [np.array_equal(a, b) for a, b in zip(two, three, strict=True)] == [True, True, False]
    np.testing.assert_allclose([np.linalg.norm(values[2]) for values in after], 32**0.5, rtol=1e-6)

    kernels = whitening.kernels(records.read_split(cifar10_dir, "train").images)
    np.testing.assert_array_equal(first["block1/conv1/whitening/weights"], kernels)
    for layer, channels, filters in (("block1/conv1", 24, 32), ("block2/conv1", 32, 48), ("block3/conv2", 48, 48)):
        kernels = first[f"{layer}/weights"]
        expected = np.zeros([3, 3, channels, channels])
        expected[1, 1] = np.eye(channels)
        np.testing.assert_array_equal(kernels[..., :channels], expected)
        if filters > channels:
            others = kernels[..., channels:]
            assert 0.9 < others.std() * np.sqrt(27 * channels) < 1.1
            assert np.abs(others).max() <= (9 * channels) ** -0.5


def test_images_are_small_at_first(examples, tmp_path, monkeypatch):
    """By the algorithm that puts several side by side."""
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    host.CPUINFO.write_text("flags : fpu amx_bf16\n")
    inference_for = functools.partial(NARROW.inference_for, sizes={0: 24, 2.5: 32})
    workload = dataclasses.replace(NARROW, inference_for=inference_for)
    with tf.Graph().as_default() as graph, v1.Session() as session:
        epochs_seen = v1.placeholder(tf.float64, [])
        with context.entered(context.Context(epochs_seen=epochs_seen)):
            logits = workload.for_examples(examples).inference(tf.zeros([2, 32, 32, 3], tf.bfloat16), True)
        whitened = next(op.inputs[0] for op in graph.get_operations() if op.type == "Conv2D")
        gradients = [each for each in tf.gradients(logits, v1.trainable_variables()) if each is not None]
        session.run(v1.global_variables_initializer())
        for epochs, pixels in ((0.0, 24), (2.4, 24), (2.5, 32)):
            shape, *_ = session.run([tf.shape(whitened), *gradients], {epochs_seen: epochs})
            assert shape.tolist() == [2, pixels, pixels, 3]


@pytest.mark.parametrize("text", ["24", "0:24,x:32", "1:24", "0:24,-1:32", "0:24,nan:32", "0:24,0:32", "0:8", "0:33"])
def test_sizes_of_images_that_cannot_be_are_one_line(text):
    with pytest.raises(errors.ConfigError, match=f"^--image_sizes={text}: it must be EPOCH:PIXELS,.*9 to 32 pixels"):
        cifar10.WORKLOAD.with_options({"model": "cifar10_94", "image_sizes": text})


@pytest.mark.parametrize("model, features", [("cifar10_94", 256), ("cifar10_96", 512)])
def test_what_is_no_filter_moves_as_the_script_says_but_for_the_head(examples, model, features):
    """Its rates are for the sum of losses over a batch, the head's for logits divided by the number of features, and
    1.5 times as great for 94 %."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    with tf.Graph().as_default(), context.entered(context.Context()) as entered:
        workload.for_examples(examples).inference(tf.zeros([2, 32, 32, 3]), False)
        names = {variable.op.name for variable in v1.trainable_variables()}
        decays = v1.losses.get_regularization_losses()
        assert model != "cifar10_94" or sum(np.prod(each.shape) for each in v1.trainable_variables()) == 1_971_352
    of = {name: group for name, group in entered.param_groups.items() if name in names}
    convolutions = (1, 2, 3) if model == "cifar10_96" else (1, 2)
    filters = {f"block{block}/conv{conv}/weights" for block in (1, 2, 3) for conv in convolutions}
    assert names - of.keys() == filters
    assert len(decays) == len(of) == len(filters) + 2  # the betas, the whitening's biases and the head
    assert {(learning.muon, learning.momentum) for learning in of.values()} == {(False, 0.825)}
    rates = {name: learning.rate_factor * 0.205 for name, learning in of.items()}
    head = 1.5 if model == "cifar10_94" else 1
    assert rates["head/weights"] == pytest.approx(head * 0.5415 * 1536 * (9 / features) ** 2)
    assert rates["block2/conv1/batch_normalization/beta"] == pytest.approx(0.0573 * 1536)
    biases = of["block1/conv1/whitening/biases"]
    assert math.ceil(biases.until_epoch * 50_000 / 1536) == 7  # steps


@pytest.mark.parametrize(
    "dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.01), ("float16", 0.004)]
)
def test_swish_and_its_derivative_are_those_of_the_sigmoid_formula(dtype, tolerance):
    beta, places = 1.702, np.concatenate([np.linspace(-12, 12, 201), [-300, 300]])

    def value_and_slope(x):
        y = cifar10_94.scaled_swish(beta / 2 * x) / beta
        return [y, *tf.gradients(y, x)]

    places = places.astype(tf.as_dtype(dtype).as_numpy_dtype)
    found, slope = (result.astype(np.float64) for result in values.of(value_and_slope, places))
    x = places.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-beta * x))
    np.testing.assert_allclose(found, x * sigmoid, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(slope, sigmoid + beta * x * sigmoid * (1 - sigmoid), atol=tolerance, rtol=tolerance)


def test_whitened_patches_are_uncorrelated_and_of_variance_nearly_one():
    """eigenvalue / (eigenvalue + epsilon), by TensorFlow's convolution, on smooth images: pixels and channels are
    correlated. The greatest eigenvalue comes first, directions are fixed, and the second half is their negative."""
    noise = np.random.default_rng(0).normal(size=[700, 10, 9, 3])
    smooth = noise[:, 1:, 1:] + noise[:, :-1, 1:] + noise[:, 1:, :-1]
    images = np.clip(120 + 30 * (smooth + smooth.mean(axis=-1, keepdims=True)), 0, 255).astype(np.uint8)
    kernels = whitening.kernels(images)
    assert kernels.shape == (2, 2, 3, 24) and kernels.dtype == np.float32
    np.testing.assert_array_equal(kernels[..., 12:], -kernels[..., :12])
    rows = kernels[..., :12].reshape(12, 12).T
    assert (np.diff(np.linalg.norm(rows, axis=1)) > 0).all()  # 1 / sqrt(eigenvalue + epsilon)
    assert (rows[np.arange(12), np.abs(rows).argmax(axis=1)] > 0).all()
    assert whitening.kernels(images[::-1]).tobytes() == kernels.tobytes(), "whatever the order of the images"
    normal = (images.astype(np.float64) - crops.MEAN) / crops.DEVIATION
    found = values.of(lambda x: tf.nn.conv2d(x, kernels[..., :12], 1, "VALID"), normal.astype(np.float32))
    assert found.shape == (700, 8, 7, 12)
    patches = np.lib.stride_tricks.sliding_window_view(normal, (2, 2), axis=(1, 2)).reshape(-1, 12)
    eigenvalues = np.linalg.eigvalsh(np.cov(patches, rowvar=False))[::-1]
    assert eigenvalues[-1] < 0.5 * eigenvalues[0]
    expected = np.diag(eigenvalues / (eigenvalues + 5e-4))
    np.testing.assert_allclose(np.cov(found.reshape(-1, 12), rowvar=False), expected, atol=1e-3)
    np.testing.assert_allclose(expected, np.eye(12), atol=0.05)
