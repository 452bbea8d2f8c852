"""Graph-mode multi-GPU training: one replica ("tower") per device, gradients averaged.

    result = tower_train.train("cifar10", tower_train.Config(num_gpus=2, max_steps=200))

trains a workload given by its import path or as a `Workload`.
"""

import importlib

__version__ = "0.2.0"

# Loaded on first use, so that `python -m tower_train --help` does not wait for TensorFlow.
_HOMES = {
    "BroadcastGlobalVariablesHook": "tower_train.fronts.distributed",
    "Config": "tower_train.config",
    "DataRequest": "tower_train.examples",
    "DistributedOptimizer": "tower_train.fronts.distributed",
    "Evaluation": "tower_train.inference.evaluator",
    "Examples": "tower_train.examples",
    "Result": "tower_train.run.results",
    "UserError": "tower_train.errors",
    "Weighted": "tower_train.examples",
    "Workload": "tower_train.workload",
    "EvaluateOptions": "tower_train.config",
    "ExportOptions": "tower_train.config",
    "average_gradients": "tower_train.graph.gradients",
    "classification_metrics": "tower_train.measures",
    "cluster": "tower_train.cluster",
    "data": "tower_train.data",
    "draw_curves": "tower_train.inference.curves",
    "estimator": "tower_train.estimator",
    "evaluate_run": "tower_train.inference.saved_run",
    "export_run": "tower_train.inference.saved_model",
    "initializers": "tower_train.initializers",
    "keras_network": "tower_train.fronts.keras_network",
    "layers": "tower_train.layers",
    "mean_squared_error": "tower_train.measures",
    "multi_gpu_model": "tower_train.fronts.multi_gpu_model",
    "regression_metrics": "tower_train.measures",
    "steps": "tower_train.steps",
    "softmax_cross_entropy": "tower_train.measures",
    "tower_loss": "tower_train.graph.towers",
    "train": "tower_train.run.train",
    "training_steps": "tower_train.run.train",
    "workloads": "tower_train.workloads",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'tower_train' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if _HOMES[name] == f"{__name__}.{name}" else getattr(home, name)


def __dir__():
    return sorted(__all__)
