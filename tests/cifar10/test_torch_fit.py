"""The network in PyTorch is the same as ours. Skipped where PyTorch is not installed: it is no dependency."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import cifar10
from cifar10 import crops, records, rivals
from tower_train.workload import DataRequest

v1 = tf.compat.v1

WORKLOAD = cifar10.WORKLOAD.with_options({"model": "cifar10_94"})

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")


def torch_rivals():
    return {rival.name: rival for rival in rivals.of(WORKLOAD.options).rivals if rival.name.startswith("torch")}


def test_without_torch_there_is_no_such_rival(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert not torch_rivals()


@needs_torch
@pytest.mark.parametrize("training", [False, True])
def test_it_has_the_same_network(cifar10_dir, training):
    import torch

    from cifar10.rivals import torch_fit

    images = np.random.default_rng(0).normal(size=[6, 32, 32, 3]).astype(np.float32)
    examples = WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    rng = np.random.default_rng(1)
    with tf.Graph().as_default(), v1.Session() as session:
        logits = WORKLOAD.for_examples(examples).inference(tf.constant(images), training)
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        trained = v1.trainable_variables()
        session.run(v1.global_variables_initializer())
        for variable in variables.values():
            if variable.shape.rank == 1:  # they begin at 0 or 1, which would hide them
                variable.load(rng.uniform(0.5, 1.5, variable.shape), session)
        values, expected = session.run((variables, logits))
    network = torch_fit.Network(np.zeros([2, 2, 3, 24], np.float32)).train(training)
    network.load(values)
    with torch.no_grad():
        found = network(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    assert sum(parameter.numel() for group in network.groups() for parameter in group["params"]) == sum(
        np.prod(variable.shape) for variable in trained
    )


@needs_torch
def test_images_are_shifted_reflected_and_flipped():
    """Each is one of the 50 that numpy makes of it, and of many all of them come."""
    import torch

    from cifar10.rivals import torch_fit

    image = np.random.default_rng(0).integers(0, 256, [32, 32, 3], np.uint8)
    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)], "reflect")
    shifted = [padded[i : i + 32, j : j + 32] for i in range(5) for j in range(5)]
    possible = {array.tobytes() for one in shifted for array in (one, one[:, ::-1])}
    torch.manual_seed(0)
    distorted = torch_fit.distorted(torch.from_numpy(image).expand(1000, -1, -1, -1))
    assert distorted.is_contiguous(memory_format=torch.channels_last)
    pixels = distorted.permute(0, 2, 3, 1).numpy() * crops.DEVIATION + crops.MEAN
    assert {array.tobytes() for array in pixels.round().astype(np.uint8)} == possible


@needs_torch
@pytest.mark.parametrize("name, dtype", [("torch", "float32"), ("torch/bfloat16", "bfloat16")])
def test_it_learns(tmp_path, name, dtype):
    """A class is a pattern of its own, and noise."""
    import torch

    torch.set_num_threads(1)  # where other tests share the cores, its threads wait for each other most of the time
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, [10, 3072])
    for file in records.ALL_FILES:
        labels = np.arange(40) % 10
        images = np.clip(patterns[labels] + rng.integers(-30, 31, [40, 3072]), 0, 255)
        np.column_stack([labels, images]).astype(np.uint8).tofile(tmp_path / file)
    losses = []

    def after_step(loss):
        losses.append(loss)
        return len(losses) == 12

    rival = torch_rivals()[name]
    assert rival.dtype == dtype
    rival.train(DataRequest("train", "cifar10", str(tmp_path)), 16, after_step)
    assert len(losses) == 12 and np.mean(losses[-3:]) < losses[0] - 0.3
