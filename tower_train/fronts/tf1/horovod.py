"""Horovod as its programs have it: one import, no further lines. Sessions find their workers by `machine.prepare`."""

import os

import tensorflow as tf
import tf_keras
from tf_keras.api._v1 import keras

from tower_train.fronts import horovod
from tower_train.fronts.horovod import *  # noqa: F403
from tower_train.fronts.horovod import DistributedOptimizer as _of_tensorflow

v1, backend = tf.compat.v1, keras.backend


def init(*_, **__) -> None:
    """Joins the cluster. Estimators then train as one worker each: their optimizers average."""
    horovod.init()
    for name in ("TF_CONFIG", "SLURM_PROCID"):
        os.environ.pop(name, None)


def mpi_threads_supported() -> bool:
    return False


def DistributedOptimizer(optimizer, name=None, **kwargs):  # noqa: N802
    """Horovod's, for an optimizer of tf.train or of Keras 2."""
    if not isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return _of_tensorflow(optimizer, name, **kwargs)
    averaging, gradients = (
        _of_tensorflow(v1.train.GradientDescentOptimizer(0.0), name, **kwargs),
        optimizer.get_gradients,
    )

    def get_gradients(loss, params):
        return [grad for grad, _ in averaging.average(list(zip(gradients(loss, params), params, strict=True)))]

    optimizer.get_gradients = get_gradients
    return optimizer


class BroadcastGlobalVariablesCallback(tf_keras.callbacks.Callback):
    """Begins with the values of one worker in all."""

    def __init__(self, root_rank, device=""):
        super().__init__()
        self._root_rank = root_rank

    def on_train_begin(self, logs=None):
        backend.get_session().run(horovod.broadcast_global_variables(self._root_rank))


class MetricAverageCallback(tf_keras.callbacks.Callback):
    """Replaces an epoch's metrics by their means over workers."""

    def __init__(self, device=""):
        super().__init__()
        self._means = {}

    def on_epoch_end(self, epoch, logs=None):
        for name in sorted(logs or ()):
            if name not in self._means:
                given = backend.placeholder([], name=f"{name}_of_worker")
                self._means[name] = given, horovod.allreduce(given, name=name)
            given, mean = self._means[name]
            logs[name] = backend.get_session().run(mean, {given: logs[name]})
