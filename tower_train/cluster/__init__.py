"""Clusters: `init` for programs with their own sessions; this process's task, the membership of a cluster."""

import importlib

# Loaded on first use: the commands look for their task before they wait for TensorFlow.
_PUBLIC = ("Cluster", "current", "init")


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tower_train.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.program"), name)
