"""Horovod as its programs have it: one import, no further lines. fronts.tf1.views gives sessions their workers."""

import math
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


def load_model(filepath, custom_optimizers=None, custom_objects=None, **kwargs):
    """Loads a Keras 2 model and makes its optimizer average."""
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = tf_keras.models.load_model(filepath, objects)
    DistributedOptimizer(model.optimizer, **kwargs)
    return model


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


class LearningRateScheduleCallback(tf_keras.callbacks.Callback):
    """Multiplies the first learning rate by a number or a function of the epoch, in epochs from start_epoch on.

    Where the rate changes, momentum is corrected for that step: Goyal et al. 2017, section 2.1.
    """

    def __init__(
        self, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None
    ):
        super().__init__()
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.epochs = start_epoch, math.inf if end_epoch is None else end_epoch
        self.staircase, self.steps, self.momentum = staircase, steps_per_epoch, None
        self.corrects = momentum_correction

    def on_train_begin(self, logs=None):
        self.rate = _backend.get_value(self.model.optimizer.lr)
        if not self.steps:
            self.steps = self.params.get("steps") or math.ceil(self.params["samples"] / self.params["batch_size"])

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_batch_begin(self, batch, logs=None):
        if not self.epochs[0] <= self.epoch < self.epochs[1] or (self.staircase and batch):
            return
        optimizer, before = self.model.optimizer, _backend.get_value(self.model.optimizer.lr)
        optimizer.lr = after = self.rate * self.multiplier(self.epoch + (0 if self.staircase else batch / self.steps))
        if self.corrects and before and hasattr(optimizer, "momentum"):  # of a rate of 0 there is no share
            self.momentum = _backend.get_value(optimizer.momentum)
            optimizer.momentum = self.momentum * after / before

    def on_batch_end(self, batch, logs=None):
        if self.momentum is not None:
            self.model.optimizer.momentum, self.momentum = self.momentum, None


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate within the first epochs from that of one worker to the optimizer's."""

    def __init__(self, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
        super().__init__(self._share, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def _share(self, epoch):
        return (1 + (epoch + 1 / self.steps) / self.epochs[1] * (horovod.size() - 1)) / horovod.size()

    def on_epoch_end(self, epoch, logs=None):
        if self.verbose and epoch == self.epochs[1] - 1:
            rate = _backend.get_value(self.model.optimizer.lr)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
