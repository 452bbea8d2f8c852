"""The place where examples are preprocessed: the GPUs where all of it has kernels there, with the same results."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import cifar10
from cifar10 import distort
from tower_train import errors
from tower_train.data import tf_data
from tower_train.graph import devices, evaluation, stream, transfer
from tower_train.graph.layout import on_host
from tower_train.workload import DataRequest, Examples, Workload

GPUS, CPUS = ("/gpu:0", "/gpu:1"), ("/cpu:0", "/cpu:1")
IMAGES = Examples.from_arrays("images", np.zeros([9, 4, 4, 3], np.uint8), np.zeros(9, np.int64))
TEXTS = Examples.from_arrays("texts", np.array([b"1"] * 9), np.zeros(9, np.int64))


def of(distortion, examples=IMAGES, wanted="auto", towers=GPUS):
    return transfer.choose(wanted, Workload("mine", None, None, distort=distortion), examples, towers)


def as_floats(images, draws):
    return tf.cast(images, tf.float32) * draws.uniform("light", 1)[:, :, tf.newaxis, tf.newaxis]


def in_python(images, draws):
    return tf.ensure_shape(tf.numpy_function(np.float32, [images], tf.float32), images.shape)


def mirrored(images, draws):
    return tf.cast(tf.gather(images, [3, 2, 1, 0], axis=1), tf.float32)


def one_by_one(images, draws):
    images = as_floats(images, draws)
    return tf.map_fn(lambda image: image - tf.reduce_mean(image), images)


def on_condition(images, draws):
    return tf.cond(draws.epochs[0] > 0, lambda: mirrored(images, draws), lambda: as_floats(images, draws))


def test_gpus_that_can_preprocess_do_so_and_examples_cross_as_they_are():
    found = of(as_floats)
    assert (found.distorts_there, found.stages) == (True, True)
    assert found.note == "distorts: on the GPUs; examples cross as uint8"


@pytest.mark.parametrize(
    ("distortion", "examples", "why"),
    [
        (in_python, IMAGES, "GPUs have no kernel for PyFunc"),
        (mirrored, IMAGES, "GPUs have no kernel for GatherV2 of uint8"),
        (one_by_one, IMAGES, "loops, such as tf.map_fn's, are slow on GPUs"),
        (on_condition, IMAGES, "GPUs have no kernel for GatherV2 of uint8"),  # in a function's body
        (lambda texts, draws: tf.strings.to_number(texts), TEXTS, "GPUs have no kernel for StringToNumber"),
        (lambda images, draws: as_floats(images, draws)[:, :1, :1], IMAGES, "it makes examples smaller"),
    ],
)
def test_what_they_cannot_is_done_on_the_host_and_said(distortion, examples, why):
    found = of(distortion, examples)
    assert (found.distorts_there, found.stages) == (False, True)
    assert found.note.startswith(f"distorts: on the host, as {why}")


def test_on_cpus_nothing_changes_and_nothing_is_said():
    assert of(as_floats, towers=CPUS) == transfer.Transfer(CPUS)
    assert of(None, towers=GPUS) == transfer.Transfer(GPUS, stages=True)


def test_a_wish_is_heeded_or_refused_in_one_line():
    assert not of(as_floats, wanted="host").distorts_there
    assert of(as_floats, wanted="device", towers=CPUS).distorts_there
    with pytest.raises(errors.ConfigError, match="^--distort_on=device: GPUs have no kernel for PyFunc. Use") as error:
        of(in_python, wanted="device")
    assert "\n" not in str(error.value)


def test_examples_in_an_order_of_their_own_cross_distorted_unless_asked_for():
    """Checkpoints hold them as they cross, and are to be resumed on any device."""
    dataset = tf.data.Dataset.from_tensors((np.zeros([4, 4, 3], np.uint8), 0)).repeat()
    examples = tf_data.examples("endless", lambda: dataset, 9, "abc")
    found = of(as_floats, examples)
    assert not found.distorts_there and found.note.startswith("distorts: on the host, as this data set has an order")
    assert of(as_floats, examples, wanted="device").distorts_there


@pytest.mark.parametrize("model", ["convnet", "cifar10_94", "resnet20"])
def test_the_reference_workloads_are_preprocessed_on_gpus(model):
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "generated"))
    for each in (workload, dataclasses.replace(workload, distort=None)):
        found = transfer.choose("auto", each, examples, GPUS)
        assert found.note == "distorts: on the GPUs; examples cross as uint8"


@pytest.mark.parametrize(
    ("model", "as_gpus_do"), [("convnet", False), ("convnet", True), ("cifar10_94", False), ("resnet20", False)]
)
def test_images_are_the_same_to_the_bit_wherever_they_are_distorted(model, as_gpus_do, cifar10_dir, monkeypatch):
    """GPUs make sums and copies otherwise, since they round the factors of products."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    seen = []
    for there in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=two_cpus()) as session:
            way = transfer.Transfer(CPUS, distorts_there=there)
            first = tf.constant(190, tf.int64)  # an epoch is 200
            source = stream.training_stream(workload, examples, 5, first, on_host(16, 2), way)
            session.run(source.initializer)
            seen.append(session.run(source.batches))
        monkeypatch.setattr(distort, "_is_on_gpu", lambda tensor: as_gpus_do)
    for found, expected in zip(*map(tf.nest.flatten, seen), strict=True):
        assert np.std(expected) > 0.5
        np.testing.assert_array_equal(found, expected)


def two_cpus():
    return tf.compat.v1.ConfigProto(device_count={"CPU": 2})


def test_images_to_evaluate_cross_as_they_are_too(cifar10_dir):
    workload = cifar10.WORKLOAD
    examples = workload.examples(DataRequest("test", "cifar10", str(cifar10_dir)))
    config = workload.config(num_gpus=2)
    for gpus, dtype in ((["one", "another"], "uint8"), (None, "float32")):
        placed = devices.place(config, gpus_here=gpus) if gpus else devices.place(config)
        built = evaluation.evaluation_graph(workload, examples, 4, "float32", 0.0, placed)
        [fetched] = [op for op in built.graph.get_operations() if op.type == "IteratorGetNext"]
        images = [tensor.dtype.name for tensor in fetched.outputs if tensor.shape.rank == 4]
        assert images == 2 * [dtype]
