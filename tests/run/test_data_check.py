"""The look at a new run's data: likely mistakes are told, and the first examples are drawn as the network gets them."""

import dataclasses
import io

import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
from PIL import Image

from tower_train import Examples, Workload, errors
from tower_train.data import example_images, tf_data
from tower_train.run import data_check
from tower_train.workload import DataRequest

GRAYS = np.arange(24) * 10
CENTRES = [(8 + column * 136 + 64, 8 + row * 152 + 64) for row in range(4) for column in range(6)]


def centres(png):
    """The drawn images' middle pixels, red only."""
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (8 + 6 * 136, 8 + 4 * 152)
    return [picture.getpixel(centre)[0] for centre in CENTRES]


def network(images, training):
    with tf.compat.v1.variable_scope("layer"):
        weights = tf.compat.v1.get_variable("weights", [16, 3], tf.float32)
    return tf.reshape(tf.cast(images, tf.float32), [-1, 16]) @ weights


def test_a_new_run_tells_and_shows_each_augmented_example_and_a_resumed_one_does_not(tmp_path, capsys):
    images = np.broadcast_to(GRAYS[:, np.newaxis, np.newaxis, np.newaxis], [24, 4, 4, 1]).astype(np.uint8)
    workload = Workload(
        "gray",
        lambda request: Examples.from_arrays("gray", images, np.arange(24) % 2, ("even", "odd", "none")),
        network,
        augment=lambda images, draws: 255 - images,
    )
    options = dict(workload=workload, check_data=True, batch_size=8, learning_rate=1e-9)
    jobs.train_small(tmp_path, max_steps=1, **options)
    assert capsys.readouterr().out.count("*** gray: no example is of class none") == 1
    png = (tmp_path / "examples.png").read_bytes()
    assert sorted(centres(png)) == sorted(255 - GRAYS)
    assert centres(png) != sorted(centres(png)), "in the order of the training"
    (event,) = jobs.events(tmp_path).Images("examples")
    assert (event.step, event.encoded_image_string, event.width) == (0, png, 824)
    (tmp_path / "examples.png").unlink()
    jobs.train_small(tmp_path, max_steps=2, **options)
    jobs.train_small(tmp_path / "another", max_steps=1, **options | dict(check_data=False))
    assert not [*tmp_path.rglob("examples.png")] and "no example" not in capsys.readouterr().out


def test_values_of_any_range_are_stretched_together():
    """By one factor, so that an image of half the brightness is drawn so; a pixel in a thousand does not count."""
    images = np.stack([np.full([8, 8, 3], value) for value in np.linspace(-1, 1, 24)])
    images[0, 0, 0, 0], images[1, 0, 0, 0] = 1e6, np.nan
    assert centres(example_images.draw(images, np.zeros(24))) == pytest.approx(np.linspace(0, 255, 24), abs=0.51)


@pytest.mark.parametrize(
    ("label", "names", "text"),
    [
        (1, ("cat", "dog"), "dog"),
        ([0.25, 0.75], ("cat", "dog"), "0.75 dog\n0.25 cat"),
        ([0.3, 0.2, 0.5], ("ant", "cat", "dog"), "0.50 dog\n0.30 ant\n0.20 cat"),
        ([True, False, True], ("ant", "cat", "dog"), "ant\ndog"),
        (2.123456, (), "2.123"),
        ([1, 2, 3, 4], (), "1, 2, 3"),
        (b"x", (), ""),
    ],
)
def test_labels_are_told_as_far_as_they_fit(label, names, text):
    assert "\n".join(example_images.caption(np.array(label), names)) == text


NAMES = ("ant", "bee", "cat")
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=[900, 4]).astype(np.float32)
LABELS = np.arange(900) % 3


def arrays(features=FEATURES, labels=LABELS, names=NAMES):
    return Examples.from_arrays("mine", features, labels, names)


def ordered(labels, names=NAMES):
    """The same as a dataset, in the order of the labels, which are known by looking only."""
    make = lambda: tf.data.Dataset.from_tensor_slices((FEATURES[: len(labels)], labels)).repeat()  # noqa: E731
    return tf_data.examples("mine", make, len(labels), names)


def warnings(examples, **workload):
    return data_check.look(dataclasses.replace(toy_workload.WORKLOAD, **workload), examples, seed=0)[0]


def changed(where, value):
    features = FEATURES.copy()
    features[where] = value
    return features


NAMES_OF_100 = [f"class {i}" for i in range(100)]


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        (arrays(), None),
        (ordered(LABELS), None),
        (arrays(names=()), None),
        (arrays(labels=RNG.normal(size=[900, 2]), names=()), None),
        (arrays(labels=np.sort(LABELS)), None),  # the trainer shuffles all of it
        (arrays(features=RNG.integers(0, 5000, [900, 4])), None),  # integers may be words
        (ordered(LABELS, NAMES_OF_100), None),  # a sample says nothing of many classes
        (arrays(names=NAMES_OF_100), "no example is of class class 3, class 4"),
        (arrays(labels=LABELS % 2), "no example is of class cat (of all)."),
        (ordered(LABELS % 2), "no example is of class cat (of the 500 looked at). Does the dataset come sorted by"),
        (ordered(np.sort(LABELS)), "no example is of class cat"),
        (
            arrays(features=changed(np.s_[:90, 2], np.nan)[:400], labels=LABELS[:400]),
            "90 of 400 examples looked at have features that are not finite",
        ),
    ],
)
def test_a_likely_mistake_is_one_line_and_good_data_are_passed_over_in_silence(examples, expected):
    found = warnings(examples)
    assert len(found) == (expected is not None)
    assert all(line.startswith(f"*** mine: {expected}") and "\n" not in line for line in found)


@pytest.mark.parametrize(
    ("examples", "line"),
    [
        (lambda: arrays(labels=np.where(np.arange(900) == 899, 3, LABELS)), "mine: there is a label 3; labels are 0"),
        (lambda: ordered(np.where(np.arange(900) == 0, 3, LABELS)), "mine: there is a label 3; labels are 0 to"),
        (lambda: arrays(labels=0 * LABELS, names=NAMES[:1]), "mine: there is one class only, ant, and nothing"),
        (
            lambda: element_workloads.workload(element_workloads.failing).examples(DataRequest("train")),
            "failing train: the input failed: no such row",
        ),
        (
            lambda: tf_data.examples(
                "none", lambda: tf.data.Dataset.from_tensor_slices(([1.0], [0])).skip(1), 1, NAMES
            ),
            "none: its dataset gives no examples",
        ),
    ],
)
def test_data_that_cannot_be_are_one_line(examples, line):
    with pytest.raises(errors.DataError, match=f"^{line}"):
        warnings(examples())
