"""The toy workload, whose input takes SECONDS a step, whatever its batch."""

import dataclasses
import time

import tensorflow as tf
import toy_workload

SECONDS = 0.1


def load(request):
    return dataclasses.replace(toy_workload.load(request), parallel_steps=1)


def slowly(features, draws=None):
    later = tf.numpy_function(lambda x: time.sleep(SECONDS) or x, [features], features.dtype)
    return tf.ensure_shape(later, features.shape)


WORKLOAD = dataclasses.replace(toy_workload.WORKLOAD, examples=load, augment=slowly)
