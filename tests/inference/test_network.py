"""Trained networks: every example once, the mean over views, no threads that keep a session from closing."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

from tower_train.errors import GraphError
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Layout, Tower
from tower_train.graph.stream import training_stream
from tower_train.graph.variables import Variables
from tower_train.inference.evaluation_graph import evaluation_stream
from tower_train.inference.network import trained_outputs
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


def linear(features, training):
    return features @ v1.get_variable("weights", [4, 4])


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def viewed(views, inference=linear, dtype=tf.float64, unsure=None):
    """The outputs of two towers on float64 features [2, 4] that differ."""
    batches = [tf.reshape(tf.range(8.0, dtype=tf.float64), [2, 4]) + i for i in (0, 9)]
    workload, variables = Workload("toy", None, inference, test_time_augmentation=views, unsure=unsure), Variables()
    return [
        trained_outputs(workload, features, dtype, variables, Tower(i, "/cpu:0"), Draws("test"))[0]
        for i, features in enumerate(batches)
    ]


def test_views_are_looked_at_by_one_network_one_after_the_other(graph):
    """In every tower; together they would take twice the time, and all their memory."""
    seen, made = [], []

    def network(features, training):
        assert training is False
        seen.append(features)
        made.append(features @ v1.get_variable("w", [4, 3], tf.float64))
        return made[-1]

    viewed(lambda x: [(0.3, x), (0.6, -2 * x), (0.1, x + 1)], network)
    assert len(v1.global_variables()) == 1
    waits = [made[i - 1].op in seen[i].op.control_inputs for i in range(1, 6)]
    assert waits == [True, True, False, True, True]


def test_the_mean_over_views_is_in_full_precision(graph):
    """Also in bfloat16, whose eight bits would lose the second view."""
    views = [(255 / 256, 1.0), (1 / 256, 1.5)]
    built = viewed(lambda x: [(w, 0 * x + value) for w, value in views], lambda x, training: x, dtype=tf.bfloat16)
    with v1.Session() as session:
        np.testing.assert_array_equal(session.run(built[0]), np.full([2, 4], 1 + 0.5 / 256, np.float32))


@pytest.mark.parametrize("doubt", [-1, 4, 99])
def test_sure_examples_are_looked_at_once(graph, doubt):
    def network(x, training):
        return {"a": tf.square(x), "b": x[:, 0]}

    built = viewed(lambda x: [(0.3, x), (0.7, -2 * x)], network, unsure=lambda outputs: outputs["b"] < doubt)
    with v1.Session() as session:
        found = session.run(built)
    for outputs, first in zip(found, (0, 9), strict=True):
        x = np.arange(8.0).reshape(2, 4) + first
        is_mean = x[:, 0] < doubt
        np.testing.assert_allclose(outputs["a"], np.where(is_mean[:, None], 0.3 + 0.7 * 4, 1) * x**2, rtol=1e-12)
        np.testing.assert_allclose(outputs["b"], np.where(is_mean, 0.3 - 0.7 * 2, 1) * x[:, 0], rtol=1e-12)


def test_views_that_cannot_be_averaged_are_refused(graph):
    with pytest.raises(GraphError, match="^workload toy: the weights of its views are 0.5, 0.4, which sum to 0.9"):
        viewed(lambda x: [(0.5, x), (0.4, x)], lambda x, training: linear(tf.cast(x, tf.float32), training))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_examples_by_index_start_no_tuner_for_which_a_session_would_wait_when_it_closes(kind):
    """tf.data's tuner sleeps up to a minute, and is not always woken."""
    examples = Examples.from_arrays("points", np.zeros([4, 2], np.float32), np.zeros(4, np.int64))
    workload = Workload("points", None, None)
    with tf.Graph().as_default() as graph:
        if kind == "train":
            training_stream(workload, examples, 0, tf.constant(0, tf.int64), Layout(2, ("/cpu:0",)))
        else:
            evaluation_stream(workload, examples, 2, 1)
        found = [op.get_attr("serialized_options") for op in graph.get_operations() if op.type == "OptionsDataset"]
    options = [dataset_options_pb2.Options.FromString(each).autotune_options for each in found]
    assert [each.enabled for each in options if each.HasField("enabled")] == [False]
