"""Rivals: other ways to train the same networks, for `python -m tower_train.benchmark`.

The benchmark looks for a module `rivals` beside the workload, and in it for `of(options)`, the rivals of the workload
under these options of its own, and `flops_per_example(options)`. Ratios are taken to the first rival.
"""

import dataclasses
import importlib.metadata
import os

from tower_train import errors
from tower_train.bench.sides import Side

TORCH_PATHS = "TORCH_PATHS"  # environment variable: folders of packages, each with another PyTorch, separated by :

# Of training: of convolutions and matrix products, a multiplication and an addition as two, once forward and once for
# each operand's gradient; the images have none. tests/cifar10/test_rivals.py counts them.
_FLOPS = {
    "convnet": 105_295_104, "cifar10_94": 707_777_088, "cifar10_95": 1_808_258_112, "cifar10_96": 2_710_696_512,
}  # fmt: skip


def of(options) -> list[Side]:
    """Returns the rivals of a model: Keras for the tutorial's network and those of cifar10_94, the published script for
    the tutorial's only, for cifar10_94 itself each PyTorch that is installed or in TORCH_PATHS; for others none."""

    def rival(name, module, label, num_devices=1, dtype="float32", is_quick=False, **arguments) -> Side:
        return Side(name, f"{__name__}.{module}:train", arguments, num_devices, dtype, is_quick, label)

    def keras(name, label, num_devices=1, **more) -> Side:
        return rival(f"keras/{name}", "keras_fit", label, num_devices, model=options.model, **more)

    sides = [
        keras("fit", "Keras fit", is_quick=True),
        keras("MirroredStrategy 2", "Keras MirroredStrategy, 2 replicas", 2, is_quick=True, num_replicas=2),
    ]
    if options.model == "convnet":
        return [_port(1, is_quick=True), _port(2), *sides]
    if options.model not in _FLOPS:
        return []
    narrow = dict(dtype="bfloat16", is_quick=True)
    sides.append(keras("fit bfloat16", "Keras fit, bfloat16", dtype_policy="mixed_bfloat16", **narrow))
    for version, packages in torches() if options.model == "cifar10_94" else ():
        name, label = f"torch {version}", f"PyTorch {version}"
        full = rival(name, "torch_fit", label, is_quick=True)
        half = rival(f"{name}/bfloat16", "torch_fit", f"{label}, bfloat16", autocast=True, **narrow)
        sides += [dataclasses.replace(side, packages=packages) for side in (full, half)]
    return sides


def _port(towers: int, **more) -> Side:
    name, arguments = ("port", {}) if towers == 1 else (f"port/{towers} towers", {"num_gpus": towers})
    label = name.replace("port", "Published script, ported").replace("/", ", ")
    return Side(name, "cifar10.multi_gpu_train:train", arguments, towers, label=label, **more)


def torches() -> list[tuple[str, str | None]]:
    """Returns (version, folder of packages or None) of each PyTorch; ConfigError for a folder without one, or with a
    version that is there already."""

    def version(*path: str) -> str | None:
        there = importlib.metadata.distributions(name="torch", **({"path": list(path)} if path else {}))
        return next((each.version for each in there), None)

    found = {installed: None} if (installed := version()) else {}
    for path in filter(None, os.environ.get(TORCH_PATHS, "").split(os.pathsep)):
        if (number := version(path)) is None or number in found:
            holds = f"PyTorch {number}, as another place does" if number else "no PyTorch"
            raise errors.ConfigError(
                f"{TORCH_PATHS}: {path} holds {holds}. Name folders such as /other/lib/python3.12/site-packages."
            )
        found[number] = path
    return list(found.items())


def flops_per_example(options) -> int | None:
    """Returns the floating-point operations of a training example, in the network's plain formulation; None if they
    are not counted."""
    return _FLOPS.get(options.model)
