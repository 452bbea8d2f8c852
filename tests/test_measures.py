"""Losses and metrics that come with the trainer, against numpy, and their one line where shapes do not fit."""

import numpy as np
import pytest
import tensorflow as tf
import values

from tower_train import measures
from tower_train.errors import ConfigError, GraphError
from tower_train.workload import Workload

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "shapes", [([20], [20]), ([20, 1], [20]), ([20], [20, 1]), ([20, 3], [20, 3]), ([20, 2, 4],) * 2]
)
def test_errors_are_means_over_the_numbers_of_each_example(shapes):
    outputs, labels = (RNG.normal(size=shape).astype(np.float32) for shape in shapes)
    outputs = outputs.astype(np.float64)
    differences = outputs.reshape(20, -1) - labels.reshape(20, -1)
    found = values.of(measures.regression_metrics, outputs, labels)
    np.testing.assert_allclose(found["absolute error"], np.abs(differences).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(found["squared error"], np.square(differences).mean(axis=1), rtol=1e-6)
    found = values.of(measures.mean_squared_error, outputs, labels)
    assert found == pytest.approx(np.mean(differences**2), rel=1e-12)


@pytest.mark.parametrize("function", [measures.mean_squared_error, measures.regression_metrics])
@pytest.mark.parametrize("shapes", [([20, 2], [20]), ([20, 2], [20, 3]), ([20], [20, 2])])
def test_nothing_is_broadcast(function, shapes):
    with pytest.raises(GraphError, match=r"got outputs tensor float64 \(20.*\) and labels tensor float64 \(20.*\)\. L"):
        values.of(function, *(RNG.normal(size=shape) for shape in shapes))


@pytest.mark.parametrize(("kind", "dtype"), [("u1", "f4"), ("i2", "f8"), ("u4", "f4"), ("i8", "f8")])
def test_classes_of_every_integer_type_have_a_cross_entropy_and_ranks(kind, dtype):
    logits, labels = RNG.normal(size=[50, 8]).astype(dtype), RNG.integers(0, 8, 50).astype(kind)
    logarithms = logits - np.log(np.exp(logits.astype("f8")).sum(axis=1, keepdims=True))
    loss = values.of(measures.softmax_cross_entropy, logits, labels)
    assert loss.dtype == dtype and loss == pytest.approx(-logarithms[np.arange(50), labels].mean(), rel=1e-6)
    rank = np.argmax(np.argsort(-logits, axis=1) == labels[:, np.newaxis], axis=1)
    found = values.of(measures.classification_metrics, logits, labels)
    assert found.keys() == {"precision @ 1", "precision @ 5"} and found["precision @ 1"].dtype == np.float32
    np.testing.assert_array_equal(found["precision @ 1"], rank < 1)
    np.testing.assert_array_equal(found["precision @ 5"], rank < 5)


def test_ties_and_numbers_that_are_none_count_against_the_right_class():
    """On fed logits: among constants, which TensorFlow computes beforehand, NaN would not be what it is in a run."""
    logits = np.array([[3, 3, 2, 2, 1, 1, 0]] * 7 + [[3, np.nan, *[1] * 5], [np.nan] * 7])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = tf.compat.v1.placeholder(tf.float64, [None, 7])
        found = session.run(measures.classification_metrics(fed, tf.constant([*range(7), 0, 0])), {fed: logits})
    np.testing.assert_array_equal(found["precision @ 1"], np.zeros(9))
    np.testing.assert_array_equal(found["precision @ 5"], [1, 1, 1, 1, 0, 0, 0, 1, 0])


def test_the_first_five_are_told_only_where_there_are_more():
    for classes, ranks in ((2, [1]), (5, [1]), (6, [1, 5])):
        found = values.of(measures.classification_metrics, np.zeros([1, classes]), np.array([0]))
        assert list(found) == [f"precision @ {k}" for k in ranks]


@pytest.mark.parametrize("function", [measures.softmax_cross_entropy, measures.classification_metrics])
@pytest.mark.parametrize("labels", [np.zeros([20]), np.zeros([20, 2], int)])
def test_labels_that_are_no_classes_are_one_line(function, labels):
    with pytest.raises(GraphError, match=rf"{function.__name__} takes .* and integer labels .*mean_squared_error"):
        values.of(function, RNG.normal(size=[20, 3]), labels)
    with pytest.raises(GraphError, match=r"int64 \(20, 3\). Labels that are one-hot become such by labels.argmax"):
        values.of(function, RNG.normal(size=[20, 3]), np.zeros([20, 3], int))
    with pytest.raises(GraphError, match=r"labels tensor int64 \(20, 1\). Labels in a column .* by labels\[:, 0\]"):
        values.of(function, RNG.normal(size=[20, 3]), np.zeros([20, 1], int))


def test_a_metric_says_which_way_is_better():
    mine = Workload("mine", None, None, mode={"off by": "min", "precision @ 1": "min"})
    names = "off by", "squared error", "precision @ 1", "precision @ 5", "x"
    assert [*map(mine.metric_mode, names)] == ["min", "min", "min", "max", None]
    with pytest.raises(ConfigError, match="mode={'off by': 'least'}; it must be 'min' or 'max'"):
        Workload("mine", None, None, mode={"off by": "least"})
