"""The orientation that cameras write into JPEG files: read from any form of it, and applied as Pillow does."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tower_train.data import decoding, orientation

v1 = tf.compat.v1
JFIF = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
COMMENT = b"\xff\xfe\x00\x05abc"


@pytest.fixture(scope="module")
def read():
    """bytes of a file -> the orientation that is read from it."""
    with tf.Graph().as_default(), v1.Session() as session:
        contents = v1.placeholder(tf.string, [])
        found = orientation.orientation(contents)
        yield lambda value: int(session.run(found, {contents: value}))


@pytest.fixture(scope="module")
def decode():
    """bytes of a file -> its image, uint8 [20, 30, 3]."""
    with tf.Graph().as_default(), v1.Session() as session:
        contents = v1.placeholder(tf.string, [])
        image = decoding.decode_contents(contents, 20, 30, 3)
        yield lambda value: session.run(image, {contents: value})


@pytest.fixture(scope="module")
def jpeg():
    """A photograph, so to say: 40 x 60 pixels, of a different colour in each corner."""
    y, x = np.mgrid[0:1:40j, 0:1:60j]
    image = np.stack([255 * x, 255 * y, 120 + 100 * x * y], axis=-1).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "jpeg", quality=100, subsampling=0)
    return stream.getvalue()


def exif(value, order=">", before=(), offset=8):
    """The segment APP1 with a TIFF directory that names the orientation, after other tags."""
    entries = [struct.pack(order + "HHII", tag, 3, 1, 7) for tag in before]
    entries += [struct.pack(order + "HHIHH", 0x112, 3, 1, value, 0)]
    directory = struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4)
    tiff = (b"MM" if order == ">" else b"II") + struct.pack(order + "HI", 42, offset) + bytes(offset - 8) + directory
    return b"\xff\xe1" + struct.pack(">H", 8 + len(tiff)) + b"Exif\0\0" + tiff


def with_segments(jpeg, *segments):
    """The file with other segments in the place of its APP0."""
    return jpeg[:2] + b"".join(segments) + jpeg[2 + len(JFIF) :]


@pytest.mark.parametrize("value", range(1, 9))
@pytest.mark.parametrize("order", "<>")
def test_it_is_read_from_where_it_stands(read, jpeg, value, order):
    for segments in (
        [exif(value, order)],
        [JFIF, exif(value, order, before=[0x10F, 0x110])],
        [JFIF, COMMENT, b"\xff\xe1\x00\x06http", exif(value, order, offset=30), COMMENT],
    ):
        assert read(with_segments(jpeg, *segments)) == value


def test_files_that_do_not_say_are_as_they_are(read, jpeg):
    assert read(jpeg) == read(b"") == read(b"\xff\xd8") == read(b"\x89PNG\r\n\x1a\n") == 1
    assert read(with_segments(jpeg, exif(0))) == read(with_segments(jpeg, exif(9))) == 1
    assert read(jpeg[:-2] + exif(6) + jpeg[-2:]) == 1, "after the image begins there is none"


def test_damaged_exif_is_no_error(read, jpeg):
    rng, whole = np.random.default_rng(0), with_segments(jpeg, exif(6))
    for end in range(2, 60):
        assert read(whole[:end]) in range(1, 9)
    for _ in range(200):
        at = rng.integers(2, 60)
        assert read(whole[:at] + rng.bytes(4) + whole[at + 4 :]) in range(1, 9)


@pytest.mark.parametrize("value", range(1, 9))
def test_images_are_turned_as_pillow_turns_them(decode, jpeg, value):
    contents = with_segments(jpeg, exif(value))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(contents))).resize((30, 20), Image.BILINEAR)
    np.testing.assert_allclose(decode(contents).astype(int), np.asarray(expected).astype(int), atol=4)
