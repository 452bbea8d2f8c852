"""A workload whose examples are not finite at some positions of the stream."""

import dataclasses
import math

import tensorflow as tf
import toy_workload

EVERY_STEP = dict(log_every_steps=1, summary_every_steps=1, save_every_steps=5)


def poisoned(first, end, value=math.nan):
    """The toy workload, but that the examples at positions first to end - 1 have features that are not finite."""

    def spoil(features, draws):
        bad = (draws.positions >= first) & (draws.positions < end)
        return tf.where(bad[:, tf.newaxis], value, toy_workload.add_noise(features, draws))

    return dataclasses.replace(toy_workload.WORKLOAD, augment=spoil)
