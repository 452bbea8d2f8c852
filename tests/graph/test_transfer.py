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
IMAGES = Examples.from_arrays("images", np.zeros([9, 4, 4, 3], np.uint8), np.zeros(9, np.int64))


def of(wanted="auto", examples=IMAGES, towers=GPUS, **fields):
    return transfer.choose_transfer(wanted, Workload("mine", None, None, **fields), examples, towers)


def as_floats(images, draws):
    return tf.cast(images, tf.float32) * draws.uniform("light", 1)[:, :, tf.newaxis, tf.newaxis]


def test_a_workload_says_whether_gpus_preprocess():
    on_device, on_host = of(augment=as_floats, augments_on_devices=True), of(augment=as_floats)
    assert (on_device.augments_there, on_device.is_staged) == (True, True)
    assert on_device.note == "augments: on the GPUs (--augment_on=auto)"
    assert (on_host.augments_there, on_host.is_staged) == (False, True)
    assert on_host.note == "augments: on the host (--augment_on=auto)"


def test_on_cpus_nothing_changes_and_nothing_is_said():
    assert of(augment=as_floats, augments_on_devices=True, towers=CPUS) == transfer.Transfer()
    assert of(towers=GPUS) == transfer.Transfer(is_staged=True)


def test_the_option_decides_otherwise():
    assert not of("host", augment=as_floats, augments_on_devices=True).augments_there
    assert of("device", augment=as_floats).augments_there
    assert of("device", augment=as_floats, towers=CPUS).augments_there


def test_examples_in_an_order_of_their_own_cross_augmented_in_their_step_unless_asked_for():
    """Checkpoints hold them as they cross, and are to be resumed on any device."""
    dataset = tf.data.Dataset.from_tensors((np.zeros([4, 4, 3], np.uint8), 0)).repeat()
    examples = tf_data.examples("endless", lambda: dataset, 9, "abc")
    auto = of("auto", examples, augment=as_floats, augments_on_devices=True)
    assert not auto.augments_there and not auto.is_staged
    assert of("device", examples, augment=as_floats).augments_there


@pytest.mark.parametrize(
    ("model", "as_gpus_do"), [("convnet", False), ("convnet", True), ("cifar10_94", False), ("resnet20", False)]
)
def test_images_are_the_same_to_the_bit_wherever_they_are_augmented(model, as_gpus_do, cifar10_dir, monkeypatch):
    """GPUs make sums and copies otherwise, since they round the factors of products."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    seen = []
    for there in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=two_cpus()) as session:
            crossing = transfer.Transfer(augments_there=there)
            first = tf.constant(190, tf.int64)  # an epoch is 200
            source = stream.training_stream(workload, examples, 5, first, Layout(16, CPUS), crossing)
            session.run(source.initializer)
            seen.append(session.run(source.batches))
        monkeypatch.setattr(augment, "_is_on_gpu", lambda tensor: as_gpus_do)
    for found, expected in zip(*map(tf.nest.flatten, seen), strict=True):
        assert np.std(expected) > 0.5
        np.testing.assert_array_equal(found, expected)


def two_cpus():
    return tf.compat.v1.ConfigProto(device_count={"CPU": 2})
