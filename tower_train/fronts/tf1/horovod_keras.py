"""horovod.keras: its callbacks, and operations whose values a program gets at once."""

import math

import numpy as np
import tensorflow as tf
import tf_keras

from tower_train.fronts import horovod
from tower_train.fronts.tf1.horovod import *  # noqa: F403
from tower_train.fronts.tf1.horovod import DistributedOptimizer

_backend = tf.compat.v1.keras.backend


def allreduce(value, name=None, average=True):
    return _backend.get_session().run(horovod.allreduce(tf.constant(value), average, name=name))


def allgather(value, name=None):
    return _backend.get_session().run(horovod.allgather(tf.constant(value), name))


def broadcast(value, root_rank, name=None):
    return _backend.get_session().run(horovod.broadcast(tf.constant(value), root_rank, name))


def load_model(filepath, custom_optimizers=None, custom_objects=None, **kwargs):
    """Loads a model of Keras 2, whose optimizer averages."""
    custom = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = tf_keras.models.load_model(filepath, custom)
    DistributedOptimizer(model.optimizer, **kwargs)
    return model


class BroadcastGlobalVariablesCallback(tf_keras.callbacks.Callback):
    """Begins with the values of one worker in all."""

    def __init__(self, root_rank, device=""):
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs=None):
        _backend.get_session().run(horovod.broadcast_global_variables(self.root_rank))


class MetricAverageCallback(tf_keras.callbacks.Callback):
    """Replaces an epoch's metrics by their means over workers."""

    def on_epoch_end(self, epoch, logs=None):
        for name in sorted(logs or ()):
            logs[name] = allreduce(np.float32(logs[name]), f"{name}_{epoch}")


class LearningRateScheduleCallback(tf_keras.callbacks.Callback):
    """Multiplies the first learning rate by a number or a function of the epoch, in epochs from start_epoch on.

    Where the rate changes, momentum is corrected for that step: Goyal et al. 2017, section 2.1.
    """

    def __init__(self, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True,
                 steps_per_epoch=None, initial_lr=None):  # fmt: skip
        super().__init__()
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start, self.end, self.staircase = start_epoch, end_epoch or math.inf, staircase
        self.corrects, self.steps, self.rate, self.momentum = momentum_correction, steps_per_epoch, initial_lr, None

    def on_train_begin(self, logs=None):
        self.rate = self.rate or _backend.get_value(self.model.optimizer.lr)
        examples, size = (self.params.get(name) or 0 for name in ("samples", "batch_size"))
        self.steps = self.steps or self.params.get("steps") or math.ceil(examples / size)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_batch_begin(self, batch, logs=None):
        if not self.start <= self.epoch < self.end or (self.staircase and batch):
            return
        optimizer = self.model.optimizer
        before = _backend.get_value(optimizer.lr)
        optimizer.lr = after = self.rate * self.multiplier(self.epoch + (0 if self.staircase else batch / self.steps))
        if self.corrects and hasattr(optimizer, "momentum"):
            self.momentum = _backend.get_value(optimizer.momentum)
            optimizer.momentum = self.momentum * after / before

    def on_batch_end(self, batch, logs=None):
        if self.momentum is not None:
            self.model.optimizer.momentum, self.momentum = self.momentum, None

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["lr"] = _backend.get_value(self.model.optimizer.lr)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate within the first epochs from that of one worker to the optimizer's."""

    def __init__(self, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0, initial_lr=None):
        def multiplier(epoch):
            done = (epoch + 1 / self.steps) / warmup_epochs
            return (1 + done * (horovod.size() - 1)) / horovod.size()

        super().__init__(multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch, initial_lr)
        self.verbose = verbose

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.end - 1:
            rate = _backend.get_value(self.model.optimizer.lr)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
