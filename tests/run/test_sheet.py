"""A new run draws its first training examples as the network gets them, in TRAIN_DIR and for TensorBoard."""

import io

import jobs
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tower_train import Examples, Workload
from tower_train.run import sheet

GRAYS = np.arange(24) * 10
CENTRES = [(8 + column * 136 + 64, 8 + row * 152 + 64) for row in range(4) for column in range(6)]


def centres(png):
    """The sheet's images' middle pixels, red only."""
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (8 + 6 * 136, 8 + 4 * 152)
    return [picture.getpixel(centre)[0] for centre in CENTRES]


def network(images, training):
    with tf.compat.v1.variable_scope("layer"):
        weights = tf.compat.v1.get_variable("weights", [16, 2], tf.float32)
    return tf.reshape(tf.cast(images, tf.float32), [-1, 16]) @ weights


def test_a_new_run_shows_each_augmented_example_and_a_resumed_one_keeps_the_sheet(tmp_path):
    images = np.broadcast_to(GRAYS[:, np.newaxis, np.newaxis, np.newaxis], [24, 4, 4, 1]).astype(np.uint8)
    workload = Workload(
        "gray",
        lambda request: Examples.from_arrays("gray", images, np.arange(24) % 2, ("even", "odd")),
        network,
        augment=lambda images, draws: 255 - images,
    )
    options = dict(workload=workload, check_data=True, num_gpus=1, learning_rate=1e-9)
    jobs.train_toy(tmp_path, max_steps=1, **options)
    png = (tmp_path / "examples.png").read_bytes()
    assert sorted(centres(png)) == sorted(255 - GRAYS)
    assert centres(png) != sorted(centres(png)), "in the order of the training"
    (event,) = jobs.events(tmp_path).Images("examples")
    assert (event.step, event.encoded_image_string, event.width) == (0, png, 824)
    (tmp_path / "examples.png").unlink()
    jobs.train_toy(tmp_path, max_steps=2, **options)
    assert not (tmp_path / "examples.png").exists()


def test_values_of_any_range_are_stretched_together():
    """By one factor, so that an image of half the brightness is drawn so; a pixel in a thousand does not count."""
    images = np.stack([np.full([8, 8, 3], value) for value in np.linspace(-1, 1, 24)])
    images[0, 0, 0, 0], images[1, 0, 0, 0] = 1e6, np.nan
    assert centres(sheet.draw(images, np.zeros(24))) == pytest.approx(np.linspace(0, 255, 24), abs=0.51)


@pytest.mark.parametrize(("height", "width"), [(4, 2), (2, 4)])
def test_an_image_that_is_not_square_is_drawn_in_the_middle_of_its_cell(height, width):
    png = sheet.draw(np.full([2, height, width, 1], 9, np.uint8), np.zeros(2))
    rows, columns = np.where(np.array(Image.open(io.BytesIO(png)))[: 8 + 32 * height, :, 0] == 9)
    assert (rows.min(), rows.max()) == (8, 8 + 32 * height - 1)
    left = 8 + (128 - 32 * width) // 2
    assert sorted(set(columns)) == [x + cell for cell in (0, 136) for x in range(left, left + 32 * width)]


@pytest.mark.parametrize(("rows", "shown"), [(32, {0, 200}), (256, {100})])
def test_small_images_show_their_pixels_and_large_ones_are_averaged(rows, shown):
    """Of rows that are dark and bright in turns."""
    images = np.broadcast_to(np.uint8(200 * (np.arange(rows) % 2))[:, np.newaxis, np.newaxis], [1, rows, rows // 4, 1])
    picture = np.array(Image.open(io.BytesIO(sheet.draw(images, np.zeros(1)))))
    assert set(picture[8 + 32 : 8 + 96, 8 + 64, 0]) == shown


@pytest.mark.parametrize(("label", "names", "text"), [
    (1, ("cat", "dog"), "dog"),
    ([0.25, 0.75], ("cat", "dog"), "0.75 dog\n0.25 cat"),
    ([0.004, 0.996], ("cat", "dog"), "dog"),
    ([0.3, 0.2, 0.5], ("ant", "cat", "dog"), "0.50 dog\n0.30 ant"),
    (2.123456, (), "2.123"),
    ([1, 2, 3, 4], (), "1, 2, 3"),
    ([[1]], (), ""),
    (b"x", (), ""),
])  # fmt: skip
def test_labels_are_told_as_far_as_they_fit(label, names, text):
    assert "\n".join(sheet.caption(np.array(label), names)) == text
