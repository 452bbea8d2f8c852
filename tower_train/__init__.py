"""Graph-mode multi-GPU training: one replica ("tower") per device, gradients averaged.

    result = tower_train.train("cifar10", tower_train.Config(num_gpus=2, max_steps=200))

trains a workload given by its import path or as a `Workload`.
"""

import ast
import importlib
import pathlib

__version__ = "0.2.0"

# {public name: its module}, by the stub that type checkers read. They are loaded on first use, so that
# `python -m tower_train --help` does not wait for TensorFlow.
_STUB = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text())
_HOMES = {each.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for each in node.names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'tower_train' has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted(__all__)
