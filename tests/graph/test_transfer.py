"""The place where examples are preprocessed: the GPUs where the workload says so, with the same results."""

import numpy as np
import pytest
import tensorflow as tf

import cifar10
from cifar10 import augment
from tower_train.data import tf_data
from tower_train.graph import stream, transfer
from tower_train.graph.layout import Layout
from tower_train.workload import DataRequest, Examples, Workload

GPUS, CPUS = ("/gpu:0", "/gpu:1"), ("/cpu:0", "/cpu:1")
TWO_CPUS = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
IMAGES = Examples.from_arrays("images", np.zeros([9, 4, 4, 3], np.uint8), np.zeros(9, np.int64))


IN_ORDER = tf_data.examples(
    "endless", lambda: tf.data.Dataset.from_tensors((np.zeros([4, 4, 3], np.uint8), 0)).repeat(), 9, "abc"
)


def as_floats(images, draws):
    return tf.cast(images, tf.float32) * draws.uniform("light", 1)[:, :, tf.newaxis, tf.newaxis]


ANYWHERE, ON_HOST = dict(augment=as_floats, augments_on_devices=True), dict(augment=as_floats)


@pytest.mark.parametrize(
    ("wanted", "fields", "examples", "towers", "there", "staged", "note"),
    [
        ("auto", ANYWHERE, IMAGES, GPUS, True, True, "augments: on the GPUs (--augment_on=auto)"),
        ("auto", ON_HOST, IMAGES, GPUS, False, True, "augments: on the host (--augment_on=auto)"),
        ("host", ANYWHERE, IMAGES, GPUS, False, True, "augments: on the host (--augment_on=host)"),
        ("device", ON_HOST, IMAGES, GPUS, True, True, "augments: on the GPUs (--augment_on=device)"),
        ("auto", {}, IMAGES, GPUS, False, True, None),
        ("auto", ANYWHERE, IMAGES, CPUS, False, False, None),
        ("device", ON_HOST, IMAGES, CPUS, True, False, None),
        # In an order of their own: checkpoints hold them as they cross, and are to be resumed on any device.
        ("auto", ANYWHERE, IN_ORDER, GPUS, False, False, "augments: on the host (--augment_on=auto)"),
        ("device", ON_HOST, IN_ORDER, GPUS, True, False, "augments: on the GPUs (--augment_on=device)"),
    ],
)
def test_where_examples_are_augmented_and_whether_they_come_before_their_step(
    wanted, fields, examples, towers, there, staged, note
):
    workload = Workload("mine", None, None, **fields)
    assert transfer.choose_transfer(wanted, workload, examples, towers) == transfer.Transfer(there, staged, 0, note)


@pytest.mark.parametrize(
    ("model", "as_gpus_do"), [("convnet", False), ("convnet", True), ("cifar10_94", False), ("resnet20", False)]
)
def test_images_are_the_same_to_the_bit_wherever_they_are_augmented(model, as_gpus_do, cifar10_dir, monkeypatch):
    """GPUs make sums and copies otherwise, since they round the factors of products."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    seen = []
    for there in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=TWO_CPUS) as session:
            crossing = transfer.Transfer(augments_there=there)
            first = tf.constant(190, tf.int64)  # an epoch is 200
            source = stream.training_stream(workload, examples, 5, first, Layout(16, CPUS), crossing)
            session.run(source.initializer)
            seen.append(session.run(source.batches))
        monkeypatch.setattr(augment, "_is_on_gpu", lambda tensor: as_gpus_do)
    for found, expected in zip(*map(tf.nest.flatten, seen), strict=True):
        assert np.std(expected) > 0.5
        np.testing.assert_array_equal(found, expected)
