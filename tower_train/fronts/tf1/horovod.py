"""Horovod as its programs have it: one import, no further lines. Sessions find their workers by `machine.prepare`."""

import os

import tensorflow as tf
import tf_keras

from tower_train.fronts import horovod
from tower_train.fronts.horovod import *  # noqa: F403


def init(*_, **__) -> None:
    """Joins the cluster. Estimators then train as one worker each: their optimizers average."""
    horovod.init()
    for name in ("TF_CONFIG", "SLURM_PROCID"):
        os.environ.pop(name, None)


def mpi_threads_supported() -> bool:
    return False


def _allreduce(tensor, name=None, **_):
    return horovod.allreduce(tensor, average=False, name=name)


def DistributedOptimizer(optimizer, name=None, **kwargs):  # noqa: N802
    """Horovod's, for an optimizer of tf.train or of Keras 2."""
    if not isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return horovod.DistributedOptimizer(optimizer, name, **kwargs)
    averaging = horovod.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.0), name, **kwargs)
    gradients = optimizer.get_gradients

    def get_gradients(loss, params):
        return [grad for grad, _ in averaging.average(list(zip(gradients(loss, params), params, strict=True)))]

    optimizer.get_gradients = get_gradients
    return optimizer
