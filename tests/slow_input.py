"""The toy workload, whose input takes SECONDS a step, whatever its batch."""

import dataclasses
import time

import tensorflow as tf
import toy_workload

SECONDS = 0.1


def slowly(request):
    examples = dataclasses.replace(toy_workload.load(request), parallel_steps=1)

    def open_slow():
        fetch = examples.open()

        def wait(indices):
            time.sleep(SECONDS)
            return indices

        return lambda indices: fetch(tf.ensure_shape(tf.numpy_function(wait, [indices], tf.int64), indices.shape))

    return dataclasses.replace(examples, open=open_slow)


WORKLOAD = dataclasses.replace(toy_workload.WORKLOAD, examples=slowly)
