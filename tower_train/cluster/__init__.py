"""Clusters: `init` for programs with a session of their own; this process's task, the membership of a cluster."""

import importlib

# Loaded when first used: the commands look for their task before they wait for TensorFlow.
_PUBLIC = ("Cluster", "current", "init")


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tower_train.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module("tower_train.cluster.program"), name)
