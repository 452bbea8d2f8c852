"""The rivals train the same network on the same images: what differs is how, not what.

Those of PyTorch are skipped where it is not installed: it is no dependency.
"""

import dataclasses
import functools
import importlib.util

import jobs
import keras
import numpy as np
import pytest
import sides
import tensorflow as tf

import cifar10
from cifar10 import cifar10_94, records, rivals
from cifar10.rivals import keras_networks
from tower_train.workload import DataRequest

v1 = tf.compat.v1
CLASSES, PER_FILE = 10, 40
FLOPS = {"cifar10_94": 707_777_088, "cifar10_95": 1_808_258_112, "cifar10_96": 2_710_696_512}  # docs/benchmarks.md's
MIRRORED = "keras/MirroredStrategy 2"
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed; only the benchmark needs it")


def workload_of(model):
    return cifar10.WORKLOAD.with_options({"model": model})


def rivals_of(model):
    """{name: Side}"""
    return {rival.name: rival for rival in rivals.of(workload_of(model).options)}


@pytest.fixture(scope="module")
def request_for(tmp_path_factory):
    """A DataRequest for images whose class is easily seen: a pattern of its own, and noise."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, [CLASSES, 3, 4, 4]).repeat(8, axis=2).repeat(8, axis=3)
    directory = tmp_path_factory.mktemp("patterns")
    for name in records.ALL_FILES:
        labels = np.arange(PER_FILE) % CLASSES
        images = np.clip(patterns[labels] + rng.integers(-30, 31, [PER_FILE, 3, 32, 32]), 0, 255)
        np.column_stack([labels, images.reshape(PER_FILE, -1)]).astype(np.uint8).tofile(directory / name)
    return DataRequest("train", "cifar10", str(directory))


@pytest.fixture
def narrow(monkeypatch):
    """Gives a network of cifar10_94 few filters: (its name) -> our workload with it; Keras' has as few."""

    def make(model):
        network = cifar10_94.NETWORKS[model] | {"widths": (24, 32, 40)}
        monkeypatch.setitem(keras_networks.NETWORKS, model, functools.partial(keras_networks.cifar10_94, **network))
        inference_for = functools.partial(cifar10_94.inference_for, **network)
        return dataclasses.replace(workload_of(model), inference_for=inference_for)

    return make


@pytest.fixture(scope="module")
def our_network(request_for):
    """(workload, images, training) -> {variable: value}, logits, weight decay; biases and statistics are random."""

    def run(workload, images, training=False):
        rng = np.random.default_rng(1)
        with tf.Graph().as_default(), v1.Session() as session:
            network = workload.for_examples(workload.examples(request_for)).inference
            logits = network(tf.constant(images), training)
            decay = tf.add_n(v1.losses.get_regularization_losses())
            variables = {variable.op.name: variable for variable in v1.global_variables()}
            session.run(v1.global_variables_initializer())
            for variable in variables.values():
                if variable.shape.rank == 1:  # they begin at 0 or 1, which would hide them
                    variable.load(rng.uniform(0.5, 1.5, variable.shape), session)
            return session.run((variables, logits, decay))

    return run


MOST, IN_A_ROW = 120, 12


def have_fallen(losses):
    """Returns whether any twelve in a row are lower than the first: at a high learning rate some steps go wrong, and
    the steps after them. In 32 runs 80 steps saved 1.3 or more; weights that only decay would save 0.3 in MOST. No
    false alarm in 32: at most 9 % with a confidence of 95 %, and far less at half the fall and MOST steps."""
    medians = [np.median(losses[start : start + IN_A_ROW]) for start in range(len(losses) - IN_A_ROW)]
    return bool(medians) and min(medians) < np.mean(losses[:5]) - 0.7


def train_until_it_has(rival, request):
    """Trains a rival on 16 images a step, at most MOST steps. Keras tells the mean of the losses so far."""
    told = []

    def losses():
        return np.diff(np.array(told) * np.arange(1, len(told) + 1), prepend=0) if "keras" in rival.name else told

    def after_step(loss):
        told.append(float(loss))
        return len(told) == MOST or have_fallen(losses())

    request = dataclasses.asdict(request) if rival.without_tensorflow else request
    sides.trained_by(rival)(request, 16, after_step)
    return have_fallen(losses())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("convnet", "port/2 towers"),
        *(pytest.param("cifar10_94", f"torch{more}", marks=needs_torch) for more in ("", "/bfloat16")),
    ],
)
def test_each_learns(model, name, request_for):
    rival = rivals_of(model)[name]
    if name.startswith("torch"):
        importlib.import_module("torch").set_num_threads(1)  # its threads wait for each other where cores are shared
    assert train_until_it_has(rival, request_for)


def test_keras_trains_in_bfloat16(request_for, narrow):
    narrow("cifar10_94")
    rival, losses = rivals_of("cifar10_94")["keras/fit/bfloat16"], []

    def after_step(loss):
        losses.append(float(loss))
        return len(losses) == 2

    try:
        sides.trained_by(rival)(request_for, 8, after_step)
        assert keras.config.dtype_policy().name == "mixed_bfloat16" and np.isfinite(losses).all()
    finally:
        keras.config.set_dtype_policy("float32")  # of the other tests in this process


def test_mirrored_replicas_learn(request_for):
    """In a process of its own, whose devices nobody has used yet."""
    program = f"""
import sys
sys.path.insert(0, {str(jobs.TESTS / "cifar10")!r})
import test_rivals
from tower_train.workload import DataRequest
request = DataRequest("train", "cifar10", {request_for.data_dir!r})
assert test_rivals.train_until_it_has(test_rivals.rivals_of("convnet")[test_rivals.MIRRORED], request)
"""
    done = jobs.command("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", ["convnet", "cifar10_96"])  # 94 and 95 leave parts of it out
def test_keras_has_the_networks_layer_for_layer(our_network, model, narrow):
    workload = workload_of(model) if model == "convnet" else narrow(model)
    theirs = keras_networks.NETWORKS[model]()
    images = np.random.default_rng(0).normal(size=[2, *theirs.input_shape[1:]]).astype(np.float32)
    values, logits, decay = our_network(workload, images)
    names = {"kernel": "weights", "bias": "biases"}
    for variable in theirs.variables:
        scope, name = variable.path.split("/")[-2:]
        variable.assign(values.pop(f"{scope.replace('.', '/')}/{names.get(name, name)}"))
    assert not values
    np.testing.assert_allclose(theirs(images), logits, rtol=1e-3, atol=1e-3)
    assert float(sum(theirs.losses)) == pytest.approx(decay, rel=1e-4)


@pytest.mark.parametrize("model", FLOPS)
def test_the_arithmetic_is_that_of_the_layers(model):
    """Two operations for each product; three times, but where the images or kernels that are not trained come in."""
    total, network = 0, keras_networks.NETWORKS[model]()
    for layer in network.layers:
        kernel, outputs = getattr(layer, "kernel", None), layer.output
        if kernel is not None:
            is_trained = any(kernel is variable for variable in network.trainable_variables)
            is_first = layer.input is network.inputs[0]
            count = 2 * np.prod(outputs.shape[1:]) * np.prod(kernel.shape[:-1])
            total += count * (1 + is_trained + (not is_first))
    assert FLOPS[model] == total


def torch_values(values):
    """Our variables by PyTorch's names; kernels are [filters, channels, rows, columns] there."""
    state = {
        "whitening.weight": values["block1/conv1/whitening/weights"].transpose(3, 2, 0, 1),
        "whitening.bias": values["block1/conv1/whitening/biases"],
        "head.weight": values["head/weights"].T,
    }
    for i in range(6):
        layer = f"block{i // 2 + 1}/conv{i % 2 + 1}"
        state[f"convolutions.{i}.weight"] = values[f"{layer}/weights"].transpose(3, 2, 0, 1)
        for ours, theirs in (("beta", "bias"), ("moving_mean", "running_mean"), ("moving_variance", "running_var")):
            state[f"normalizations.{i}.{theirs}"] = values[f"{layer}/batch_normalization/{ours}"]
    return state


@needs_torch
@pytest.mark.parametrize("training", [False, True])
def test_it_has_the_same_network(our_network, training):
    import torch

    from tower_train.bench import torch_fit

    images = np.random.default_rng(0).normal(size=[6, 32, 32, 3]).astype(np.float32)
    values, expected, _ = our_network(workload_of("cifar10_94"), images, training)
    data = {"whitening": torch.zeros([2, 2, 3, 24])}
    network = torch_fit.Cifar10_94(rivals.for_torch("cifar10_94"), data).train(training)
    state = {name: torch.tensor(np.ascontiguousarray(value)) for name, value in torch_values(values).items()}
    network.load_state_dict(network.state_dict() | state)
    with torch.no_grad():
        found = network(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    # What test_cifar10_94 counts.
    assert sum(parameter.numel() for group in network.groups() for parameter in group["params"]) == 1_971_352
