"""The network in PyTorch is the same as ours. Skipped where PyTorch is not installed: it is no dependency."""

import importlib.util

import numpy as np
import pytest
import sides

import cifar10
from cifar10 import rivals

WORKLOAD = cifar10.WORKLOAD.with_options({"model": "cifar10_94"})

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")


def torch_rivals():
    return {rival.name: rival for rival in rivals.of(WORKLOAD.options) if rival.name.startswith("torch")}


def test_without_torch_there_is_no_such_rival(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert not torch_rivals()


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

    from cifar10.rivals import torch_fit

    images = np.random.default_rng(0).normal(size=[6, 32, 32, 3]).astype(np.float32)
    values, expected, _ = our_network("cifar10_94", images, training)
    network = torch_fit.Network(np.zeros([2, 2, 3, 24], np.float32)).train(training)
    state = {name: torch.tensor(np.ascontiguousarray(value)) for name, value in torch_values(values).items()}
    network.load_state_dict(network.state_dict() | state)
    with torch.no_grad():
        found = network(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    # What test_cifar10_94 counts.
    assert sum(parameter.numel() for group in network.groups() for parameter in group["params"]) == 1_971_352


@needs_torch
@pytest.mark.parametrize("name, dtype", [("torch", "float32"), ("torch/bfloat16", "bfloat16")])
def test_it_learns(losses_of, name, dtype):
    import torch

    torch.set_num_threads(1)  # where other tests share the cores, its threads wait for each other most of the time
    rival = torch_rivals()[name]
    assert rival.dtype == dtype
    losses = losses_of(sides.trained_by(rival), steps=20)
    assert len(losses) == 20 and np.mean(losses[-3:]) < losses[0] - 0.3
