"""idx files: values in, values out, and one clear line for every way a file can lie."""

import gzip

import idx_files
import numpy as np
import pytest
import tensorflow as tf
import values

from tower_train import errors
from tower_train.data import idx

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
NAMES = ("no", "yes", "perhaps")


def pixels(count):
    return np.random.default_rng(count).integers(0, 256, [count, 5, 4], np.uint8)


@pytest.mark.parametrize(("pack", "shape"), [(bytes, (2, 3, 4)), (gzip.compress, (7,)), (bytes, (0, 4))])
def test_values_of_every_type_and_shape_are_read_plain_and_gzipped(tmp_path, pack, shape):
    for kind, code in CODES.items():
        array = (np.arange(np.prod(shape)) * 37 % 120).reshape(shape).astype(kind)
        (tmp_path / kind).write_bytes(pack(idx_files.idx(array, code)))
        read = idx.read(tmp_path / kind)
        assert read.dtype == np.dtype(kind) and read.dtype.isnative
        np.testing.assert_array_equal(read, array)


WHOLE = idx_files.idx(pixels(6))
DAMAGES = {
    "empty": (b"", "begins with nothing; an idx file begins with 00 00"),
    "text": (b"<html>", "begins with 3c 68 74 6d;"),
    "unknown type": (WHOLE[:2] + b"\x0a" + WHOLE[3:], "begins with 00 00 0a 03;"),
    "no dimension": (WHOLE[:3] + b"\0" + WHOLE[4:], "begins with 00 00 08 00;"),
    "half a header": (WHOLE[:15], "holds 15 bytes, more or fewer than its header says"),
    "too short": (WHOLE[:-3], "holds 133 bytes, more or fewer"),
    "too long": (WHOLE + b"x", "holds 137 bytes, more or fewer"),
    "lying": (WHOLE[:4] + b"\xff" * 12 + WHOLE[16:], "holds 136 bytes, more or fewer"),
    "half a gzip": (gzip.compress(WHOLE)[:-9], "is damaged: "),
    "a gzip of other bytes": (gzip.compress(WHOLE)[:30] + b"\xff\xff\xff" + gzip.compress(WHOLE)[33:], "is damaged: "),
    "the beginning of a gzip": (gzip.compress(WHOLE)[:5], "is damaged: "),
}


@pytest.mark.parametrize(("content", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_line_with_the_file(tmp_path, content, words):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(errors.DataError, match=f"^{path}: .*({words})") as raised:
        idx.read(path)
    assert "\n" not in str(raised.value)


def examples(folder, images, labels):
    for name, array in (("images", images), ("labels", labels)):
        (folder / name).write_bytes(idx_files.idx(array, CODES[array.dtype.str[1:]]))
    return idx.examples("small", folder / "images", folder / "labels", NAMES)


def test_examples_are_fetched_by_index(tmp_path):
    images = pixels(6)
    found = examples(tmp_path, images, np.array([2, 1, 0, 0, 1, 2], np.uint8))
    assert (found.name, found.num_examples, found.class_names) == ("small", 6, NAMES)
    with tf.Graph().as_default():
        shapes = [tensor.shape for tensor in found.open()(tf.constant([5, 0, 5], tf.int64))]
    assert shapes == [(3, 5, 4, 1), (3,)]
    batch = values.fetched(found, [5, 1, 5])
    np.testing.assert_array_equal(batch[0][..., 0], images[[5, 1, 5]])
    np.testing.assert_array_equal(batch[1], [2, 1, 2])
    assert (batch[0].dtype, batch[1].dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (pixels(6), np.zeros(5, np.uint8), "images holds 6 images and .*labels 5 labels; they do not belong"),
        (pixels(3), np.array([0, 3, 9], np.uint8), "labels: label 1 is 3; labels are 0 to 2"),
        (np.zeros(6, np.uint8), np.zeros(6, np.uint8), r"images: holds uint8 values of shape \(6,\); expected"),
        (pixels(6), np.zeros(6, np.int32), "labels: holds int32 values"),
        (pixels(0), np.zeros(0, np.uint8), r"images: holds uint8 values of shape \(0, 5, 4\)"),
    ],
)
def test_files_that_are_no_images_and_labels_are_refused(tmp_path, images, labels, text):
    with pytest.raises(errors.DataError, match=text):
        examples(tmp_path, images, labels)
