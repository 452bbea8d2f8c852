"""Losses and metrics that come with the trainer, against numpy, and their one line where shapes do not fit."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train import measures
from tower_train.errors import ConfigError, GraphError
from tower_train.workload import Workload

RNG = np.random.default_rng(0)


def evaluated(function, *arrays):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(function(*map(tf.constant, arrays)))


@pytest.mark.parametrize(
    "shapes", [([20], [20]), ([20, 1], [20]), ([20], [20, 1]), ([20, 3], [20, 3]), ([20, 2, 4],) * 2]
)
def test_errors_are_means_over_the_numbers_of_each_example(shapes):
    outputs, labels = (RNG.normal(size=shape).astype(np.float32) for shape in shapes)
    outputs = outputs.astype(np.float64)
    differences = outputs.reshape(20, -1) - labels.reshape(20, -1)
    found = evaluated(measures.regression_metrics, outputs, labels)
    np.testing.assert_allclose(found["absolute error"], np.abs(differences).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(found["squared error"], np.square(differences).mean(axis=1), rtol=1e-6)
    found = evaluated(measures.mean_squared_error, outputs, labels)
    assert found == pytest.approx(np.mean(differences**2), rel=1e-12)


@pytest.mark.parametrize("function", [measures.mean_squared_error, measures.regression_metrics])
@pytest.mark.parametrize("shapes", [([20, 2], [20]), ([20, 2], [20, 3]), ([20], [20, 2])])
def test_nothing_is_broadcast(function, shapes):
    with pytest.raises(GraphError, match=r"got outputs float64 \[20.*\] and labels float64 \[20.*\]\. Let `inference`"):
        evaluated(function, *(RNG.normal(size=shape) for shape in shapes))


@pytest.mark.parametrize("function", [measures.softmax_cross_entropy, measures.classification_metrics])
@pytest.mark.parametrize("labels", [np.zeros([20]), np.zeros([20, 1], int)])
def test_labels_that_are_no_classes_are_one_line(function, labels):
    with pytest.raises(GraphError, match=rf"{function.__name__} takes .* and integer labels .*mean_squared_error"):
        evaluated(function, RNG.normal(size=[20, 3]), labels)
    with pytest.raises(GraphError, match=r"int64 \[20, 3\]. Labels that are one-hot become such by labels.argmax"):
        evaluated(function, RNG.normal(size=[20, 3]), np.zeros([20, 3], int))


def test_a_metric_says_which_way_is_better():
    mine = Workload("mine", None, None, mode={"off by": "min", "precision @ 1": "min"})
    names = "off by", "squared error", "precision @ 1", "precision @ 5", "x"
    assert [*map(mine.mode_of, names)] == ["min", "min", "min", "max", None]
    with pytest.raises(ConfigError, match="mode={'off by': 'least'}; it must be 'min' or 'max'"):
        Workload("mine", None, None, mode={"off by": "least"})
