"""A regression: the sine of a number, learned from 512 examples. Labels are numbers, and there are no classes."""

import numpy as np
import tensorflow as tf
import toy_workload

import tower_train


def load(request):
    x = np.random.default_rng(len(request.split)).uniform(-3, 3, [512, 1]).astype(np.float32)
    return tower_train.Examples.from_arrays(f"sine {request.split}", x, np.sin(x)[:, 0])


def network(x, training):
    return toy_workload.layer("out", tf.nn.tanh(toy_workload.layer("hidden", x, 24)), 1)


WORKLOAD = tower_train.Workload(
    "sine",
    load,
    network,
    loss=tower_train.mean_squared_error,
    metrics=tower_train.regression_metrics,
    recipe={"optimizer": "adam", "learning_rate": 0.01, "batch_size": 32, "ema": 0.9},
)
