"""A fingerprint follows what is learnt from, and neither its place nor its storage."""

import gzip
import os

import idx_files
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import records
from tower_train.data import idx, image_files, tf_data, tf_records
from tower_train.examples import Examples

PIXELS, LABELS = np.arange(120, dtype=np.uint8).reshape(6, 5, 4), np.array([2, 1, 0, 0, 1, 1], np.uint8)


def of_arrays(folder, again, pixels=PIXELS, labels=LABELS):
    pixels = np.asfortranarray(pixels) if again else pixels
    return Examples.from_arrays("mine", pixels, labels.tolist() if again else labels.astype(int)).fingerprint


def of_dictionary(folder, again, pixels=PIXELS, labels=LABELS, name="x"):
    return Examples.from_arrays("mine", {name: pixels, "text": np.array([*"abcdef"], object)}, labels).fingerprint


def of_idx(folder, again, pixels=PIXELS, labels=LABELS):
    for name, array in (("images", pixels), ("labels", labels)):
        content = idx_files.idx(array)
        (folder / name).write_bytes(gzip.compress(content) if again else content)
    return idx.examples("mine", folder / "images", folder / "labels", "abc").fingerprint


def of_records(folder, again, pixels=PIXELS, labels=LABELS):
    paths = [folder / name for name in ("a.bin", "b.bin")]
    for path, half in zip(paths, (slice(3), slice(3, 6)), strict=True):
        images = np.pad(pixels[half].reshape(3, 20), [(0, 0), (0, 3052)])
        path.write_bytes(np.column_stack([labels[half], images]).tobytes())
    return records.read(paths).fingerprint


def of_tf_records(folder, again, pixels=PIXELS, labels=LABELS):
    for name, half in (("a", slice(3)), ("b", slice(3, 6))):
        with tf.io.TFRecordWriter(str(folder / f"{name}{'x' * again}.tfrecord")) as writer:
            for row, label in zip(pixels[half], labels[half], strict=True):
                writer.write(row.tobytes() + bytes([label]))
    return tf_records.examples("mine", folder / "*.tfrecord", lambda record: (record, 0)).fingerprint


def of_folders(folder, again, pixels=PIXELS, labels=LABELS, name="{}.png"):
    """Of names, classes and sizes."""
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = folder / f"class {label}" / name.format(i)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(int(image.sum(dtype=int))))
        os.utime(path, (again, again))
    return image_files.find(folder, "train").fingerprint()


def of_dataset(folder, again, pixels=PIXELS, labels=LABELS, **options):
    """Of shapes, types, the number, and what the user says."""
    pixels = pixels if again else pixels + 1
    return tf_data.examples("mine", lambda: tf.data.Dataset.from_tensor_slices((pixels, labels)), **options).fingerprint


NEARLY = PIXELS.copy()
NEARLY[3, 1, 1] ^= 1
OTHER = [dict(pixels=NEARLY), dict(labels=LABELS[::-1])]
FLAT, MOVED = dict(pixels=PIXELS.reshape(6, 20)), dict(pixels=np.roll(PIXELS, 3, 0), labels=np.roll(LABELS, 3))
KINDS = {  # {function: other data}
    of_arrays: [*OTHER, FLAT, dict(pixels=PIXELS.astype(int))],
    of_dictionary: [*OTHER, dict(name="y")],
    of_idx: [*OTHER, dict(pixels=PIXELS.reshape(6, 4, 5))],
    of_records: [*OTHER, MOVED],
    of_tf_records: [*OTHER, MOVED],
    of_folders: [*OTHER, dict(name="{}.jpg")],
    of_dataset: [FLAT, dict(num_examples=7), dict(fingerprint="2")],
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fingerprints_follow_the_content(kind, tmp_path):
    folders = iter(tmp_path / str(i) for i in range(9))

    def fingerprint(again=False, **changes):
        (folder := next(folders)).mkdir()
        return kind(folder, again, **changes)

    expected = fingerprint()
    assert fingerprint(again=True) == expected
    different = [fingerprint(**changes) for changes in KINDS[kind]]
    assert len({expected, *different}) == 1 + len(different), different
