"""A likely mistake in the training examples is told before a new run, and only then."""

import dataclasses

import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Examples, errors
from tower_train.data import tf_data
from tower_train.run import data_check
from tower_train.workload import DataRequest

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
        (arrays(features=changed(np.s_[:90, 2], np.nan)[:400], labels=LABELS[:400]),
         "90 of 400 examples looked at have features that are not finite"),
        (arrays(features=changed(np.s_[:, 1], np.inf)), "500 of 500 examples looked at have"),
        (arrays(features=np.ones([900, 5, 5])), "all 500 examples looked at have the same features."),
    ],
)  # fmt: skip
def test_a_likely_mistake_is_one_line_and_good_data_are_passed_over_in_silence(examples, expected):
    found = warnings(examples)
    assert len(found) == (expected is not None)
    assert all(line.startswith(f"*** mine: {expected}") and "\n" not in line for line in found)


def test_features_are_looked_at_as_the_network_gets_them():
    noise = lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype)  # noqa: E731
    assert warnings(arrays(features=np.ones([900, 4])), prepare=noise) == []
    assert len(warnings(arrays(), prepare=tf.math.log)) == 1


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_that_is_no_class_is_refused(label):
    with pytest.raises(errors.DataError, match=f"mine: there is a label {label}; labels are 0 to 2"):
        warnings(arrays(labels=np.where(np.arange(900) == 899, label, LABELS)))


def test_a_new_run_tells_and_a_resumed_one_does_not(tmp_path, capsys):
    workload = dataclasses.replace(
        toy_workload.WORKLOAD, examples=lambda request: arrays(labels=LABELS % 2, names=toy_workload.CLASSES)
    )
    for max_steps, told in ((5, 1), (10, 0)):
        jobs.train_toy(tmp_path / "run", workload=workload, max_steps=max_steps, check_data=True)
        assert capsys.readouterr().out.count("*** mine: no example is of class three") == told
    jobs.train_toy(tmp_path / "another", workload=workload, max_steps=5, check_data=False)
    assert "no example" not in capsys.readouterr().out


def test_what_fails_at_the_look_is_one_line():
    failing = element_workloads.workload(element_workloads.failing).examples(DataRequest("train"))
    with pytest.raises(errors.DataError, match="failing train: the input failed: no such row"):
        warnings(failing)
    nothing = tf_data.examples("none", lambda: tf.data.Dataset.from_tensor_slices(([1.0], [0])).skip(1), 1, NAMES)
    with pytest.raises(errors.DataError, match="none: its dataset gives no examples"):
        warnings(nothing)
    with pytest.raises(errors.DataError, match="mine: there is one class only, ant, and nothing to tell apart"):
        warnings(arrays(labels=0 * LABELS, names=NAMES[:1]))
