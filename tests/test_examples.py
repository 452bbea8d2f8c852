"""Examples are made of arrays, and the first of them can be looked at outside of any graph."""

import element_workloads
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import values
from element_workloads import IN_ORDER

from tower_train.errors import ConfigError, DataError, GraphError
from tower_train.examples import DataRequest, Examples

ROWS, CLASSES = np.arange(12.0).reshape(6, 2), np.array([0, 1, 1, 0, 0, 1])


def test_arrays_are_fetched_by_index_and_are_not_in_the_graph():
    examples = Examples.from_arrays("mine", ROWS, CLASSES, ["no", "yes"])
    assert (examples.name, examples.num_examples, examples.class_names) == ("mine", 6, ("no", "yes"))
    features, labels = values.fetched(examples, [5, 0, 5])
    np.testing.assert_array_equal(features, ROWS[[5, 0, 5]])
    np.testing.assert_array_equal(labels, [1, 0, 1])
    with tf.Graph().as_default() as graph:
        features, labels = Examples.from_arrays("big", np.zeros([10_000, 20]), np.zeros(10_000)).open()(tf.range(3))
        assert (features.shape, labels.shape) == ((3, 20), (3,))
        assert len(graph.as_graph_def().SerializeToString()) < 10_000


def test_dictionaries_and_text_come_back_as_such():
    texts = np.array(["a", "bc", "", "d", "e", "f"], object)
    features, labels = Examples.from_arrays("mine", {"x": ROWS, "of": texts}, CLASSES, weights=CLASSES + 1).first(2)
    np.testing.assert_array_equal(features["x"], ROWS[:2])
    assert features["of"].tolist() == [b"a", b"bc"]
    np.testing.assert_array_equal(labels.weights, [1, 2])


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([0.0] * 6, r"labels are float64 of shape \(6,\)"),
        ([True] * 6, r"labels are bool of shape \(6,\)"),
        ([[0]] * 6, r"labels are int64 of shape \(6, 1\)"),
        ([[0, 1]] * 6, r"labels are int64 of shape \(6, 2\).*as labels.argmax\(axis=1\) makes them"),
        ([0, 1, 2, 0, 0, 5], "there is a label 2; labels are 0 to 1"),
        ([0, 1, -1, 0, 0, 0], "there is a label -1; labels are 0 to 1"),
    ],
)
def test_labels_that_are_no_classes_are_refused_where_classes_have_names(labels, reason):
    with pytest.raises(DataError, match=f"^mine: {reason}"):
        Examples.from_arrays("mine", ROWS, np.array(labels), ["no", "yes"])
    Examples.from_arrays("mine", ROWS, np.array(labels))


@pytest.mark.parametrize(("features", "labels"), [((3, 2), (4,)), ((0, 2), (0,)), ((), ()), ((3,), ())])
def test_arrays_of_different_or_no_length_are_refused_with_their_shapes(features, labels):
    with pytest.raises(DataError) as error:
        Examples.from_arrays("mine", np.zeros(features), np.zeros(labels))
    assert str(error.value).startswith(f"mine: got features of shape {features} and labels of shape {labels};")


def test_a_fetch_made_for_arrays_gets_arrays():
    """By an index, in a loop, or of a dictionary."""
    for fetch in (
        lambda indices: (ROWS[indices], CLASSES[indices]),
        lambda indices: ([ROWS[i] for i in indices], [CLASSES[i] for i in indices]),
        lambda indices: ({"x": ROWS[indices]}, CLASSES[indices].tolist()),
    ):
        features, labels = Examples("mine", 6, lambda fetch=fetch: fetch).first(4)
        np.testing.assert_array_equal(features["x"] if isinstance(features, dict) else features, ROWS[:4])
        np.testing.assert_array_equal(labels, CLASSES[:4])


def test_mistakes_in_a_fetch_are_its_own():
    with pytest.raises(GraphError, match=r"mine: fetch returned numpy array float64 \(1, 2\). Let it return"):
        Examples("mine", 6, lambda: lambda indices: ROWS[indices]).first(4)
    with pytest.raises(NameError):
        Examples("mine", 6, lambda: lambda indices: (tf.gather(missing, indices), 0)).first(4)  # noqa: F821


@pytest.mark.parametrize("count", [1, 96, 1000])
@pytest.mark.parametrize(
    "workload", [toy_workload.WORKLOAD, IN_ORDER, element_workloads.workload(element_workloads.ending_uncounted)]
)
def test_the_first_examples_are_read_by_index_or_in_their_own_order(workload, count):
    examples = workload.examples(DataRequest("train"))
    for found, expected in zip(examples.first(count), element_workloads.arrays("train"), strict=True):
        np.testing.assert_array_equal(found, expected[:count])


FEATURES = np.arange(40.0).reshape(20, 2)
EXAMPLES = Examples.from_arrays("mine", FEATURES, np.arange(20) % 2, ["no", "yes"])


def rows(examples):
    return {tuple(row) for row in examples.first(examples.num_examples)[0].tolist()}


def test_each_example_is_on_one_side_and_the_choice_is_the_seeds():
    kept, aside = EXAMPLES.set_aside(0.3, seed=4)
    assert (kept.num_examples, aside.num_examples, aside.name) == (14, 6, "mine, validation")
    assert rows(kept) | rows(aside) == set(map(tuple, FEATURES.tolist()))
    assert rows(aside) == rows(EXAMPLES.set_aside(0.3, seed=4)[1])
    assert len({frozenset(rows(EXAMPLES.set_aside(0.3, seed)[1])) for seed in range(5)}) == 5
    assert kept.labels.tolist() == kept.first(14)[1].tolist()
    prints = {EXAMPLES.set_aside(fraction, 0)[0].fingerprint for fraction in (0.1, 0.3)}
    assert len(prints | {EXAMPLES.fingerprint}) == 3, "another run"


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_no_side_is_empty(fraction):
    with pytest.raises(ConfigError, match="cannot be divided: there are 20 of them"):
        EXAMPLES.set_aside(fraction, 0)


def test_examples_in_their_own_order_are_not_divided():
    examples = element_workloads.PIPELINE.examples(DataRequest("train"))
    with pytest.raises(ConfigError, match="they come in an order of their own.*let the workload itself"):
        examples.set_aside(0.1, 0)
