"""Horovod as its programs have it: one import, no further lines. fronts.tf1.views gives sessions their workers."""

import os

import numpy as np
import tensorflow as tf
import tf_keras

from tower_train.fronts import horovod
from tower_train.fronts.horovod import *  # noqa: F403

_backend = tf.compat.v1.keras.backend


def init(*_, **__) -> None:
    """Joins the cluster. Estimators then train as one worker each: their optimizers average."""
    horovod.init()
    for name in ("TF_CONFIG", "SLURM_PROCID"):
        os.environ.pop(name, None)


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


def allreduce_at_once(value, name=None, average=True):
    """horovod.keras.allreduce, whose value a program gets at once."""
    return _backend.get_session().run(horovod.allreduce(tf.constant(value), average, name=name))


def broadcast_at_once(value, root_rank, name=None):
    return _backend.get_session().run(horovod.broadcast(tf.constant(value), root_rank, name))


def BroadcastGlobalVariablesCallback(root_rank, device=""):  # noqa: N802
    """Gives all workers the values of one, before training."""
    return tf_keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: _backend.get_session().run(horovod.broadcast_global_variables(root_rank))
    )


def MetricAverageCallback(device=""):  # noqa: N802
    """Replaces an epoch's metrics by their means over workers."""

    def average(epoch, logs):
        for name in sorted(logs):
            logs[name] = allreduce_at_once(np.float32(logs[name]), f"{name}_{epoch}")

    return tf_keras.callbacks.LambdaCallback(on_epoch_end=average)
