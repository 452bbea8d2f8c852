"""The way of batches to devices: staged ones, which are for GPUs and forced here, train what others do, to the bit,
wherever a run is resumed; GPUs augment where the workload says so, with the same results."""

import dataclasses

import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

import cifar10
from tower_train import layers
from tower_train.data import tf_data
from tower_train.graph import stream, transfer
from tower_train.graph.layout import Layout
from tower_train.workload import DataRequest, Examples, Workload

STEPS = 3
OPTIONS = dict(num_gpus=2, batch_size=4, learning_rate=0.05, ema=0.0)


@pytest.fixture
def staging(monkeypatch):
    monkeypatch.setattr(transfer, "are_gpus", lambda devices: True)


def of_many_types(request):
    """Features of the types that need care on a GPU: int32, of which it has no variables, and text."""
    rng, labels = np.random.default_rng(0), np.arange(96) % 3
    features = {"count": labels.astype(np.int32), "text": labels.astype("S1"), "flag": labels > 0}
    features |= {"numbers": rng.normal(size=[96, 4]).astype(np.float32), "wide": rng.normal(size=[96, 4])}
    return Examples.from_arrays("of many types", features, labels, toy_workload.CLASSES)


def of_unknown_width(features, draws):
    return features | {"wide": tf.raw_ops.PlaceholderWithDefault(input=features["wide"], shape=[None, None])}


def of_types(features, training):
    dtype = features["numbers"].dtype
    others = [tf.cast(features["count"], dtype), tf.strings.to_number(features["text"], dtype)]
    numbers = features["numbers"] + tf.cast(features["wide"], dtype) + tf.add_n(others)[:, tf.newaxis]
    return toy_workload.network(tf.where(features["flag"][:, tf.newaxis], numbers, -numbers), training)


def shuffled(request):
    def make():
        return tf.data.Dataset.from_tensor_slices(element_workloads.arrays("train")).shuffle(40, seed=1).repeat()

    return tf_data.examples("shuffled", make, 96)


TOY = toy_workload.WORKLOAD
WORKLOADS = {
    "by index": TOY,
    "of many types": dataclasses.replace(TOY, examples=of_many_types, inference=of_types, augment=of_unknown_width),
    "shuffled": dataclasses.replace(TOY, examples=shuffled),
}


@pytest.mark.parametrize(
    ("kind", "augment_on"), [("by index", "device"), ("of many types", "host"), ("shuffled", "device")]
)
def test_every_step_and_every_resume_is_that_of_an_unstaged_run(kind, augment_on, monkeypatch):
    """Resumed in another session, and in the same one, every other time after a step that failed half way."""
    workload = WORKLOADS[kind]
    examples = workload.examples(DataRequest("train"))
    losses, expected = trainings.train(workload, examples, STEPS, **OPTIONS)
    monkeypatch.setattr(transfer, "are_gpus", lambda devices: True)
    with trainings.opened(workload, examples, augment_on=augment_on, **OPTIONS) as (built, session):
        points, found = [trainings.snapshot(built, session)], []
        for _ in range(STEPS):
            found.append(float(session.run(built.report).loss))
            points.append(trainings.snapshot(built, session))
        assert found == losses
        assert (
            transfer.NEXT in {op.name.rpartition("/")[2] for op in built.graph.get_operations()} or built.stream.state
        )
        jobs.assert_identical(*map(trainings.without_state, (points[-1], expected)))
        fails = tf.debugging.Assert(built.report.loss < 0, ["no"])
        config = tf.compat.v1.ConfigProto(device_count={"CPU": OPTIONS["num_gpus"]})
        with tf.compat.v1.Session(graph=built.graph, config=config) as another:
            for step, values in enumerate(points[:-1]):
                trainings.resume(built, another, values)
                if step % 2:
                    with pytest.raises(tf.errors.InvalidArgumentError):
                        another.run([built.report, fails])
                    trainings.resume(built, another, values)
                assert [float(another.run(built.report).loss) for _ in range(step, STEPS)] == losses[step:]
                found = trainings.snapshot(built, another)
                jobs.assert_identical(*map(trainings.without_state, (found, expected)))


def test_a_skipped_step_has_its_own_batch(staging, monkeypatch):
    features = np.random.default_rng(0).normal(size=[96, 4]).astype(np.float32)
    features[7] = np.inf
    examples = Examples.from_arrays("one infinite", features, np.arange(96) % 3, toy_workload.CLASSES)
    options = dict(num_gpus=2, batch_size=4, on_nonfinite="skip")
    reports = []
    for is_staged in (False, True):
        monkeypatch.setattr(transfer, "are_gpus", lambda devices, is_staged=is_staged: is_staged)
        with trainings.opened(toy_workload.WORKLOAD, examples, **options) as (built, session):
            reports.append([session.run(built.report) for _ in range(96 // 8)])
    plain, staged = reports
    assert sum(not report.finite.all() for report in plain) == 1
    for found, expected in zip(staged, plain, strict=True):
        for name, value in expected._replace(input_secs=found.input_secs)._asdict().items():
            np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


def test_a_step_that_is_not_of_the_batch_in_place_is_refused(staging):
    """Here one after the last step, for which nothing was fetched."""
    examples = toy_workload.load(DataRequest("train"))
    options = OPTIONS | dict(max_steps=2, stall_timeout_secs=9.0)
    with trainings.opened(toy_workload.WORKLOAD, examples, **options) as (built, session):
        for step in range(2):
            assert set(session.run(built.progress).values()) == {step}  # of the next step's input too
            before = session.run(built.report)
        with pytest.raises(tf.errors.InvalidArgumentError, match="the batches on the devices are not those of this"):
            session.run(built.report)
        assert session.run(tf.compat.v1.train.get_global_step(built.graph)) == before.step


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_step_tells_how_long_it_waited_for_its_input_but_not_what_came_while_it_computed(is_staged, monkeypatch):
    monkeypatch.setattr(transfer, "are_gpus", lambda devices: is_staged)
    waited, network = [], toy_workload.network
    for inference in (network, lambda features, training: network(toy_workload.slowly(features), training)):
        workload = dataclasses.replace(toy_workload.SLOW, inference=inference)
        with trainings.opened(workload, workload.examples(DataRequest("train")), batch_size=8) as (built, session):
            waited.append([session.run(built.report).input_secs for _ in range(8)])  # a busy machine computes longer
    assert max(waited[0]) > 0.05 > min(waited[1]) >= 0


def test_the_summary_shows_the_images_that_are_trained_on(staging, monkeypatch):
    images = np.arange(12, dtype=np.uint8)[:, None, None, None] * np.ones([1, 4, 4, 3], np.uint8)
    examples = Examples.from_arrays("images", images, np.zeros(12, np.int64), "a")
    workload = dataclasses.replace(
        toy_workload.WORKLOAD,
        inference=lambda images, training: toy_workload.layer("out", tf.reshape(images, [-1, 48]), 1),
        augment=lambda images, draws: tf.cast(images, tf.float32) / 4 - 1 + draws.uniform("light", 1)[:, :, None, None],
    )
    shown = []
    for is_staged in (False, True):
        monkeypatch.setattr(transfer, "are_gpus", lambda devices, is_staged=is_staged: is_staged)
        options = dict(batch_size=3, summary_every_steps=1, augment_on="device" if is_staged else "host")
        with trainings.opened(workload, examples, **options) as (built, session):
            shown.append([session.run(built.summary) for _ in range(3)])
    assert len(set(shown[0])) == 3
    assert shown[0] == shown[1]


GPUS, CPUS = ("/gpu:0", "/gpu:1"), ("/cpu:0", "/cpu:1")
TWO_CPUS = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
IMAGES = Examples.from_arrays("images", np.zeros([9, 4, 4, 3], np.uint8), np.zeros(9, np.int64))


ENDLESS = tf_data.examples(
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
        ("device", dict(prepare=tf.abs), IMAGES, GPUS, True, True, "augments: on the GPUs (--augment_on=device)"),
        ("auto", ANYWHERE, IMAGES, CPUS, False, False, None),
        ("device", ON_HOST, IMAGES, CPUS, True, False, None),
        # In an order of their own: checkpoints hold them as they cross, and are to be resumed on any device.
        ("auto", ANYWHERE, ENDLESS, GPUS, False, False, "augments: on the host (--augment_on=auto)"),
        ("device", ON_HOST, ENDLESS, GPUS, True, False, "augments: on the GPUs (--augment_on=device)"),
    ],
)
def test_where_examples_are_augmented_and_whether_they_come_before_their_step(
    wanted, fields, examples, towers, there, staged, note
):
    workload = Workload("mine", None, None, **fields)
    chosen = transfer.choose_transfer(wanted, workload, examples, towers, end=9, is_compiled=False)
    assert chosen == transfer.Transfer(there, staged, 9, False, note)


@pytest.mark.parametrize(("model", "as_gpus_do"), [("convnet", True), ("cifar10_94", False)])
def test_images_are_the_same_to_the_bit_wherever_they_are_augmented(model, as_gpus_do, cifar10_dir, monkeypatch):
    """GPUs make sums and copies otherwise, since they round the factors of products."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    seen = []
    for there in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=TWO_CPUS) as session:
            crossing = transfer.Transfer(augments_on_devices=there)
            first = tf.constant(190, tf.int64)  # an epoch is 200
            source = stream.training_stream(workload, examples, 5, first, Layout(16, CPUS), crossing)
            session.run(source.initializer)
            seen.append(session.run(source.batches))
        monkeypatch.setattr(layers, "on_gpu", lambda: as_gpus_do)
    for found, expected in zip(*map(tf.nest.flatten, seen), strict=True):
        assert np.std(expected) > 0.5
        np.testing.assert_array_equal(found, expected)
