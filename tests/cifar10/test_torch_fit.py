"""The network in PyTorch is the same as ours. Skipped where PyTorch is not installed: it is no dependency."""

import importlib.util

import numpy as np
import pytest
import sides

import cifar10
from cifar10 import crops, rivals, shifts

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
def test_brightness_and_contrast_are_drawn_for_each_image(monkeypatch):
    import torch

    from cifar10.rivals import torch_fit

    monkeypatch.setattr(shifts, "MOST", 0)
    image = np.random.default_rng(0).integers(0, 256, [32, 32, 3], np.uint8)
    torch.manual_seed(0)
    changed = torch_fit.augmented(torch.from_numpy(image).expand(1000, -1, -1, -1)).flatten(1)
    plain = (image - crops.MEAN) / crops.DEVIATION
    factors = (changed.std(1) / plain.std()).numpy()
    brightness = changed.mean(1).numpy() / factors - plain.mean()
    assert 0.869 < factors.min() < 0.88 < 1.12 < factors.max() < 1.132
    assert -0.141 < brightness.min() < -0.13 < 0.13 < brightness.max() < 0.141
    assert abs(np.corrcoef(factors, brightness)[0, 1]) < 0.15  # five standard deviations of 1 / sqrt(1000)


@needs_torch
def test_images_are_shifted_reflected_and_flipped(monkeypatch):
    """Each is one of the 50 that numpy makes of it, and of many all of them come."""
    import torch

    from cifar10.rivals import torch_fit

    image = np.random.default_rng(0).integers(0, 256, [32, 32, 3], np.uint8)
    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)], "reflect")
    shifted = [padded[i : i + 32, j : j + 32] for i in range(5) for j in range(5)]
    possible = {array.tobytes() for one in shifted for array in (one, one[:, ::-1])}
    torch.manual_seed(0)
    images = torch.from_numpy(image).expand(1000, -1, -1, -1)
    for name in ("BRIGHTNESS", "CONTRAST"):
        monkeypatch.setattr(shifts, name, 0.0)
    augmented = torch_fit.augmented(images)
    assert augmented.is_contiguous(memory_format=torch.channels_last)
    pixels = augmented.permute(0, 2, 3, 1).numpy() * crops.DEVIATION + crops.MEAN
    assert {array.tobytes() for array in pixels.round().astype(np.uint8)} == possible


@needs_torch
@pytest.mark.parametrize("name, dtype", [("torch", "float32"), ("torch/bfloat16", "bfloat16")])
def test_it_learns(losses_of, name, dtype):
    import torch

    torch.set_num_threads(1)  # where other tests share the cores, its threads wait for each other most of the time
    rival = torch_rivals()[name]
    assert rival.dtype == dtype
    losses = losses_of(sides.trained_by(rival), steps=20)
    assert len(losses) == 20 and np.mean(losses[-3:]) < losses[0] - 0.3
