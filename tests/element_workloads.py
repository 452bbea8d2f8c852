"""The toy workload on data in an order of its own: tf.data datasets of several kinds."""

import dataclasses

import norm_workload
import numpy as np
import tensorflow as tf
import toy_workload

from tower_train.data import tf_data
from tower_train.workload import DataRequest

SIZES = {"train": 96, "test": 50}


def arrays(split):
    """The toy workload's examples: features [n, 4] and labels [n]."""
    return toy_workload.load(DataRequest(split)).first(SIZES[split])


def pipeline(request):
    """A pipeline with all that tf.data can have on its way, and unseeded; labels come sorted by class."""
    dataset = tf.data.Dataset.from_tensor_slices(arrays(request.split))
    if request.split == "train":
        dataset = dataset.shuffle(40).repeat().map(lambda x, y: (x + 1, y), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(20)


def ending(request):
    return tf.data.Dataset.from_tensor_slices(arrays(request.split))


def in_order(request):
    return ending(request).repeat() if request.split == "train" else ending(request)


def ending_uncounted(request):
    return ending(request).filter(lambda features, label: True)


def generator(request):
    features, labels = arrays(request.split)
    spec = (tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(lambda: zip(features, labels, strict=True), output_signature=spec).repeat()


def failing(request):
    """An operation fails at the 50th example."""

    def divide(index, example):
        with tf.control_dependencies([tf.debugging.assert_less(index, np.int64(50), message="no such row")]):
            return tf.nest.map_structure(tf.identity, example)

    return in_order(request).enumerate().map(divide)


def workload(make):
    """The toy workload on make(request)'s elements."""

    def examples(request):
        return tf_data.examples(
            f"{make.__name__} {request.split}", lambda: make(request), SIZES[request.split], toy_workload.CLASSES
        )

    return dataclasses.replace(toy_workload.WORKLOAD, name="elements", examples=examples)


PIPELINE, IN_ORDER = workload(pipeline), workload(in_order)
NORMALIZED = dataclasses.replace(PIPELINE, inference=norm_workload.network)
UNDISTORTED = dataclasses.replace(PIPELINE, augment=None)
