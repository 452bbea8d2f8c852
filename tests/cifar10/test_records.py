"""The binary format: bytes in, images and labels out, and one clear line for every way a file can be wrong."""

import pathlib
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import records
from tower_train import errors


def _write(path, labels, seed=0):
    """Writes one record of random pixels a label; returns the pixels as uint8 [n, 3, 32, 32]."""
    pixels = np.random.default_rng(seed).integers(0, 256, [len(labels), 3072], np.uint8)
    np.column_stack([np.asarray(labels, np.uint8), pixels]).tofile(path)
    return pixels.reshape(-1, 3, 32, 32)


def test_pixel_and_label_lie_where_the_format_puts_them(tmp_path):
    record = bytearray(3073)
    record[0] = 7
    record[1 + 1 * 1024 + 5 * 32 + 9] = 200  # green, row 5, column 9
    (tmp_path / "one.bin").write_bytes(record)
    read = records.read([tmp_path / "one.bin"])
    assert read.labels.tolist() == [7] and read.labels.dtype == np.int32
    assert read.images.shape == (1, 32, 32, 3) and read.images.dtype == np.uint8
    assert np.argwhere(read.images).tolist() == [[0, 5, 9, 1]] and read.images[0, 5, 9, 1] == 200


@pytest.mark.parametrize("counts", [[1], [3, 1, 2], [999, 1000, 1001], [2500]])
def test_files_of_any_length_follow_one_another(tmp_path, counts):
    paths = [tmp_path / f"{i}.bin" for i in range(len(counts))]
    labels = [np.arange(count) % 10 for count in counts]
    pixels = [_write(path, values, seed) for seed, (path, values) in enumerate(zip(paths, labels, strict=True))]
    read = records.read(paths)
    np.testing.assert_array_equal(read.labels, np.concatenate(labels))
    np.testing.assert_array_equal(read.images, np.concatenate(pixels).transpose(0, 2, 3, 1))


def test_splits_are_the_published_files(cifar10_dir):
    train, test = (records.read_split(cifar10_dir, split) for split in ("train", "test"))
    expected = b"".join((cifar10_dir / f"data_batch_{i}.bin").read_bytes()[::3073] for i in range(1, 6))
    assert bytes(train.labels.astype(np.uint8)) == expected
    assert bytes(test.labels.astype(np.uint8)) == (cifar10_dir / "test_batch.bin").read_bytes()[::3073]


def _shorten(path):
    path.write_bytes(path.read_bytes()[: 2 * 3073 + 100])


def _spoil_label(path):
    data = bytearray(path.read_bytes())
    data[1003 * 3073] = 10
    path.write_bytes(data)


def _replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage, text",
    [
        (_shorten, "record 2 at byte offset 6146 is cut off after 100 bytes.*has 3073"),
        (_spoil_label, "record 1003 at byte offset 3082219 has label 10; labels are 0 to 9"),
        (lambda path: path.write_bytes(b""), "is empty; expected at least one record of 3073 bytes"),
        (pathlib.Path.unlink, "cannot be read: No such file"),
        (_replace_by_folder, "is not a file"),
    ],
)
def test_damage_is_told_with_its_place(tmp_path, damage, text):
    for name in ("data_batch_1.bin", "data_batch_2.bin"):
        _write(tmp_path / name, np.zeros(1200))
    damage(tmp_path / "data_batch_2.bin")
    with pytest.raises(errors.DataError, match=f"^{tmp_path}/data_batch_2.bin: .*{text}") as raised:
        records.read([tmp_path / "data_batch_1.bin", tmp_path / "data_batch_2.bin"])
    assert "\n" not in str(raised.value)


def test_fingerprint_follows_every_byte_and_the_order_of_files(tmp_path):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for seed, path in enumerate(paths):
        _write(path, [1, 2, 3], seed)
    fingerprint = records.read(paths).fingerprint
    assert len(fingerprint) == 16 and records.read(paths).fingerprint == fingerprint
    assert records.read(paths[::-1]).fingerprint != fingerprint
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    assert records.read(paths).fingerprint != fingerprint


@pytest.mark.parametrize(
    "content, own",
    [
        (None, False),
        (b"\n".join(b"class %d" % i for i in range(10)) + b"\n\n", True),
        (b"\n".join(b"class %d" % i for i in range(9)), False),
        (b"same\n" * 10, False),
    ],
)
def test_class_names_come_from_the_file_where_it_names_ten(tmp_path, content, own):
    if content is not None:
        (tmp_path / "batches.meta.txt").write_bytes(content)
    expected = tuple(f"class {i}" for i in range(10)) if own else records.CLASS_NAMES
    assert records.class_names(tmp_path) == expected


def test_examples_are_fetched_by_index_in_a_dataset_graph(cifar10_dir):
    examples = records.examples(cifar10_dir, "train", "small")
    stored = np.concatenate([np.fromfile(cifar10_dir / name, np.uint8) for name in records.FILES["train"]])
    stored = stored.reshape(-1, 3073)
    indices = np.array([[199, 0, 41], [41, 41, 7]])
    with tf.Graph().as_default() as graph:
        fetch = examples.open()
        dataset = tf.data.Dataset.from_tensor_slices(indices).map(fetch)
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        images, labels = iterator.get_next()
        assert images.shape == (3, 32, 32, 3) and images.dtype == tf.uint8 and labels.dtype == tf.int32
        with tf.compat.v1.Session() as session:
            session.run(iterator.initializer)
            for row in indices:
                got_images, got_labels = session.run([images, labels])
                pixels = stored[row, 1:].reshape(-1, 3, 32, 32)
                np.testing.assert_array_equal(got_images, pixels.transpose(0, 2, 3, 1))
                np.testing.assert_array_equal(got_labels, stored[row, 0])
        assert graph.as_graph_def().ByteSize() < 10_000, "the data must not be stored in the graph"
    assert (examples.name, examples.num_examples) == ("small train", 200)
    assert examples.fingerprint == records.read_split(cifar10_dir, "train").fingerprint


def test_one_copy_of_the_data_is_all_the_memory_it_takes(tmp_path):
    """Of what numpy and Python allocate, which tracemalloc counts on every system."""
    count, size = 10_000, 10_000 * 3072
    with open(tmp_path / "test_batch.bin", "wb") as file:
        file.truncate(count * 3073)
    tracemalloc.start()
    try:
        examples = records.examples(tmp_path, "test", "zeros")
        assert tracemalloc.get_traced_memory()[1] < 1.25 * size
        images, _ = examples.open()(np.arange(64))
        assert tracemalloc.get_traced_memory()[1] < 1.25 * size and images.shape[0] == 64
    finally:
        tracemalloc.stop()
