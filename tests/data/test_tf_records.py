"""TFRecord files by index: what was written is what is fetched, and damage is named by file and offset. A dataset of
tf.data as Examples, and its order in the stream."""

import dataclasses
import os

import element_workloads
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import values
from trainings import on_host, stream_batches

from tower_train import errors, host
from tower_train.data import tf_data, tf_records
from tower_train.graph import step_failures
from tower_train.graph.draws import Draws
from tower_train.graph.order import AllExamples
from tower_train.workload import DataRequest

SHAPE = {"features": tf.io.FixedLenFeature([4], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


def write(path, features, labels, compression=None):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for row, label in zip(features, labels, strict=True):
            example = tf.train.Example()
            example.features.feature["features"].float_list.value.extend(row)
            example.features.feature["label"].int64_list.value.append(label)
            writer.write(example.SerializeToString())


def parse(record, read=tf.io.parse_single_example):
    parsed = read(record, SHAPE)
    return parsed["features"], parsed["label"]


@pytest.fixture
def folder(tmp_path):
    """The toy workload's training examples in three files of unlike sizes."""
    features, labels = element_workloads.arrays("train")
    for i, part in enumerate(np.split(np.arange(96), [10, 70])):
        write(tmp_path / f"train-{i}.tfrecord", features[part], labels[part])
    return tmp_path


@pytest.mark.parametrize(
    ("parse_all", "batched"), [(parse, False), (lambda records: parse(records, tf.io.parse_example), True)]
)
def test_records_are_fetched_by_index_over_all_files(parse_all, batched, folder):
    examples = tf_records.examples("toy", folder / "train-*.tfrecord", parse_all, "abc", batched=batched)
    assert (examples.name, examples.num_examples, examples.class_names) == ("toy", 96, ("a", "b", "c"))
    assert examples.parallel_steps == (None if batched else host.cores())
    features, labels = element_workloads.arrays("train")
    indices = [95, 0, 9, 10, 69, 70, 0]
    found = values.fetched(examples, indices)
    np.testing.assert_array_equal(found[0], features[indices])
    np.testing.assert_array_equal(found[1], labels[indices])
    with tf.Graph().as_default():
        shapes = [tensor.shape.as_list() for tensor in examples.open()(tf.zeros([5], tf.int64))]
    assert shapes == [[5, 4], [5]]


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def claim(path, offset, length):
    """Gives a record a length and that length's checksum: a remainder of polynomials, as RFC 3720, 12.1 defines it."""
    data = length.to_bytes(8, "little")
    rest = int("".join(f"{byte:08b}"[::-1] for byte in data), 2) << 32 ^ 0xFFFFFFFF << 64
    for bit in range(95, 31, -1):
        rest ^= (rest >> bit & 1) * (0x11EDC6F41 << bit - 32)
    crc = int(f"{rest ^ 0xFFFFFFFF:032b}"[::-1], 2)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    content = path.read_bytes()
    path.write_bytes(content[:offset] + data + masked.to_bytes(4, "little") + content[offset + 12 :])


RECORD = 52 + 16  # bytes of one of these records, with what surrounds its content

DAMAGES = {
    "a bit of the content": (lambda path: flip(path, 3 * RECORD + 20), 3 * RECORD),
    "a bit of the length": (lambda path: flip(path, 3 * RECORD), 3 * RECORD),
    "a bit of a checksum": (lambda path: flip(path, 4 * RECORD - 1), 3 * RECORD),
    "a lost end": (lambda path: path.write_bytes(path.read_bytes()[: 9 * RECORD + 30]), 9 * RECORD),
    "a length of 2**62": (lambda path: claim(path, 3 * RECORD, 2**62), 3 * RECORD),
    "a length of 2**64 - 9": (lambda path: claim(path, 0, 2**64 - 9), 0),
    "another format": (lambda path: path.write_bytes(b"1,2,3\n" * 99), 0),
}


@pytest.mark.parametrize(("damage", "offset"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_named_by_file_and_offset(damage, offset, folder):
    path = folder / "train-0.tfrecord"
    assert path.stat().st_size == 10 * RECORD
    damage(path)
    with pytest.raises(errors.DataError, match=f"^{path}: the record at byte offset {offset} is damaged or cut off"):
        tf_records.examples("toy", folder / "train-*.tfrecord", parse)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ("none-*", "toy: there is no file .*none-"),
        ([], "toy: no files are named"),
        ("empty", "toy: .*empty hold no records"),
        ("folder", "folder: cannot be read: "),
        ("of ZLIB", r"of ZLIB: is compressed \(ZLIB\)"),
    ],
)
def test_files_that_cannot_be_are_one_line(patterns, text, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    write(tmp_path / "of ZLIB", *element_workloads.arrays("train"), "ZLIB")
    patterns = tmp_path / patterns if patterns else patterns
    with pytest.raises(errors.DataError, match=text) as error:
        tf_records.examples("toy", patterns, parse)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: flip(path, 7 * RECORD + 30), f"the record at byte offset {7 * RECORD} changed since training"),
        (lambda path: path.write_bytes(path.read_bytes()[: 7 * RECORD + 30]), "changed since training began"),
        (os.remove, "cannot be read: No such file"),
    ],
)
def test_a_file_that_changes_during_a_run_is_named_in_one_line(change, words, folder):
    path = folder / "train-1.tfrecord"
    examples = tf_records.examples("records", folder / "train-*.tfrecord", parse)
    change(path)
    with pytest.raises(errors.DataError, match=f"^{path}: .*{words}") as error:
        with step_failures.explained(examples, "toy"):
            values.fetched(examples, range(96))
    assert "\n" not in str(error.value)


FAULTY = {
    "one number more": ({"features": tf.io.FixedLenFeature([4], tf.float32)}, "cannot be parsed: "),
    "no such feature": ({"other": tf.io.FixedLenFeature([], tf.int64, -1)}, "cannot be parsed: Feature: label "),
    "sizes of their own": (
        {"features": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)},
        r"gives shapes \[\(5,\), \(\)\], others give \[\(4,\), \(\)\]. Fill them up",
    ),
}


@pytest.mark.parametrize(("shape", "words"), FAULTY.values(), ids=FAULTY)
def test_a_record_of_another_shape_or_without_a_feature_is_named(shape, words, tmp_path):
    features, labels = element_workloads.arrays("train")
    rows = [*features[:5].tolist(), [*features[5].tolist(), 1.0]]
    write(path := tmp_path / "train.tfrecord", rows, labels[:6])
    offset = 5 * RECORD
    if "other" in shape:
        path.write_bytes(b"")
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(tf.train.Example().SerializeToString())
        shape, offset = SHAPE | {"features": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)}, 0

    def parse_all(record):
        return tuple(tf.io.parse_single_example(record, SHAPE | shape)[name] for name in SHAPE)

    examples = tf_records.examples("records", path, parse_all)
    with pytest.raises(errors.DataError, match=f"^records: the input failed: {path}: .*offset {offset} {words}"):
        with step_failures.explained(examples, "toy"):
            values.fetched(examples, range(examples.num_examples))


def test_features_of_any_length_are_refused(folder):
    shape = SHAPE | {"features": tf.io.VarLenFeature(tf.float32)}
    parse_all = lambda record: tuple(tf.io.parse_single_example(record, shape)[name] for name in SHAPE)  # noqa: E731
    examples = tf_records.examples("records", folder / "train-*.tfrecord", parse_all)
    message = "records: there is a sparse tensor, float32 .*FixedLenFeature instead"
    with tf.Graph().as_default(), pytest.raises(errors.DataError, match=message):
        examples.open()(tf.zeros([1], tf.int64))


v1 = tf.compat.v1


def pairs(count):
    return tf.data.Dataset.range(count).map(lambda i: (tf.cast(i, tf.float32), i))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: [1, 2], {}, "elements returned a list of 1 .* Let it return a tf.data.Dataset of"),
        (lambda: tf.data.Dataset.range(3), {}, "elements returned .* of .features, label., not of these"),
        (lambda: pairs(3).repeat(), {}, "it repeats, so say how many examples make an epoch with num_examples="),
        (lambda: pairs(3).filter(lambda x, y: True), {}, "TensorFlow cannot count this dataset"),
        (lambda: tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3]]), [0, 1])), {}, "a ragged"),
        (lambda: tf.data.Dataset.from_tensor_slices((tf.sparse.eye(3), [0, 1, 2])), {}, "a sparse tensor, float32 "),
    ],
)
def test_what_cannot_be_is_one_line(make, options, text):
    with pytest.raises(errors.UserError, match=f"^mine: .*{text}"):
        tf_data.examples("mine", make, **options)


def batches(workload, examples, steps, *layout, **of_workers):
    return stream_batches(workload, examples, steps, on_host(*layout, **of_workers), seed=3)


def test_towers_share_the_elements_in_their_order_with_the_noise_of_their_positions():
    features, labels = element_workloads.arrays("train")
    workload, request = element_workloads.IN_ORDER, DataRequest("train")
    steps = batches(workload, workload.examples(request), 8, 5, 3)
    taken = np.arange(8 * 15) % 96
    np.testing.assert_array_equal(np.concatenate([labels for step in steps for _, labels in step]), labels[taken])
    with tf.Graph().as_default(), v1.Session() as session:
        draws = Draws(3, tf.constant(0, tf.int64), 8 * 15, locate=AllExamples(workload.examples(request), 3).locate)
        expected = session.run(toy_workload.add_noise(tf.constant(features[taken]), draws))
    np.testing.assert_array_equal(np.concatenate([features for step in steps for features, _ in step]), expected)


def test_several_features_and_a_symbolic_batch():
    examples = tf_data.examples("mine", lambda: pairs(7).map(lambda x, y: ({"a": x, "b": [x, x]}, y)), class_names="ab")
    assert (examples.name, examples.num_examples, examples.class_names) == ("mine", 7, ("a", "b"))
    with tf.Graph().as_default():
        features, label = examples.symbolic_batch()
    assert (features["a"].shape, features["b"].shape, label.shape) == ([1], [1, 2], [1])
    workload = dataclasses.replace(toy_workload.WORKLOAD, augment=None, prepare=lambda f: f | {"c": f["a"] * 2})
    [[(features, _)]] = batches(workload, examples, 1, 3)
    np.testing.assert_array_equal(features["c"], [0, 2, 4])
