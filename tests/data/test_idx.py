"""idx files: values in, values out, and one clear line for every way a file can lie."""

import gzip
import struct

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.data import idx

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
NAMES = ("no", "yes", "perhaps")


def encode(array, shape=None):
    """An idx file's bytes; shape: what its header says instead of the truth."""
    shape = array.shape if shape is None else shape
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, CODES[array.dtype.str[1:]], len(shape), *shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def pixels(count):
    return np.random.default_rng(count).integers(0, 256, [count, 5, 4], np.uint8)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(7,), (3, 2), (2, 3, 4), (0, 4)])
def test_values_of_every_type_and_shape_are_read_plain_and_gzipped(tmp_path, pack, kind, shape):
    values = (np.arange(np.prod(shape)) * 37 % 120).reshape(shape).astype(kind)
    (tmp_path / "file").write_bytes(pack(encode(values)))
    read = idx.read(tmp_path / "file")
    assert read.dtype == np.dtype(kind) and read.dtype.isnative
    np.testing.assert_array_equal(read, values)


DAMAGES = {
    "empty": (lambda data: b"", "begins with nothing; an idx file begins with 00 00"),
    "text": (lambda data: b"<html>", "begins with 3c 68 74 6d;"),
    "unknown type": (lambda data: data[:2] + b"\x0a" + data[3:], "begins with 00 00 0a 03;"),
    "no dimension": (lambda data: data[:3] + b"\0" + data[4:], "begins with 00 00 08 00;"),
    "half a header": (lambda data: data[:9], "ends within its header"),
    "too short": (lambda data: data[:-3], "says 6 x 5 x 4 values of 1 bytes, but 117 bytes follow"),
    "too long": (lambda data: data + b"x", "but 121 bytes follow"),
    "65 dimensions": (lambda data: b"\0\0\x08\x41" + b"\0\0\0\1" * 65 + b"x", "says 1 x 1 .* but 1 bytes follow"),
    "no values in too many rows": (
        lambda data: b"\0\0\x08\x04" + b"\0" * 4 + b"\xff" * 12,
        "says 0 x 4294967295 x .* but 0 bytes follow",
    ),
    "lying": (lambda data: data[:4] + b"\xff" * 12 + data[16:], "says 4294967295 x 4294967295 .* but 120 bytes follow"),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=list(DAMAGES))
def test_damage_is_told_in_one_line_with_the_file(tmp_path, damage, text, pack):
    path = tmp_path / "images"
    path.write_bytes(pack(damage(encode(pixels(6)))))
    with pytest.raises(errors.DataError, match=f"^{path}: .*({text})") as raised:
        idx.read(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d[:30] + b"\xff\xff\xff" + d[33:], lambda d: d[:5]])
def test_damaged_gzip_is_told(tmp_path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(encode(pixels(50)))))
    with pytest.raises(errors.DataError, match=f"^{path}: is damaged: "):
        idx.read(path)


def test_memory_is_taken_for_what_a_packed_file_holds_and_not_for_what_it_claims(tmp_path):
    """1 MiB of gzip could hold a GiB and claims to: reading what little it holds must do with the memory there is."""
    noise = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
    (tmp_path / "big.gz").write_bytes(gzip.compress(encode(noise, [2**30]), 1))
    script = (
        "import resource, sys\nfrom tower_train.data import idx\nfrom tower_train import errors\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    idx.read(sys.argv[1])\nexcept errors.DataError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = jobs.command("-c", script, str(tmp_path / "big.gz"))
    message, kilobytes = done.stdout.splitlines()
    assert "its header says 1073741824 values of 1 bytes, but 1048576 bytes follow" in message
    assert int(kilobytes) < 100_000


def write_pair(folder, images, labels):
    (folder / "images").write_bytes(encode(images))
    (folder / "labels").write_bytes(encode(labels))
    return folder / "images", folder / "labels"


def test_examples_are_fetched_by_index(tmp_path):
    images, labels = pixels(6), np.array([2, 1, 0, 0, 1, 2], np.uint8)
    examples = idx.examples("small", *write_pair(tmp_path, images, labels), NAMES)
    assert (examples.name, examples.num_examples, examples.class_names) == ("small", 6, NAMES)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = examples.open()(tf.constant([5, 0, 5], tf.int64))
        assert (found[0].shape, found[1].shape) == ((3, 5, 4, 1), (3,))
        found = session.run(found)
    np.testing.assert_array_equal(found[0][..., 0], images[[5, 0, 5]])
    np.testing.assert_array_equal(found[1], [2, 2, 2])
    assert (found[0].dtype, found[1].dtype) == (np.uint8, np.int32)


def test_the_fingerprint_follows_the_content_and_not_the_packing(tmp_path):
    images, labels = pixels(6), np.array([2, 1, 0, 0, 1, 2], np.uint8)

    def fingerprint():
        return idx.examples("small", tmp_path / "images", tmp_path / "labels", NAMES).fingerprint

    paths = write_pair(tmp_path, images, labels)
    first = fingerprint()
    for path in paths:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert fingerprint() == first
    images[3, 1, 1] ^= 1
    write_pair(tmp_path, images, labels)
    assert fingerprint() != first


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
        idx.examples("small", *write_pair(tmp_path, images, labels), NAMES)
