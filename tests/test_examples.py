"""Examples are made of arrays, and the first of them can be looked at outside of any graph."""

import decimal

import element_workloads
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import values
from element_workloads import IN_ORDER

from tower_train.data import arrays
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


@pytest.mark.parametrize("kind", [str, object, bytes])
def test_texts_are_utf_8_whatever_array_holds_them(kind):
    words = ["Köln", "", "緑", "😀", "o\u0308", "a"]
    texts = np.array([word.encode() for word in words] if kind is bytes else words, kind)
    by_hand = Examples("mine", 6, lambda: arrays.fetcher(texts, CLASSES))
    for examples in (Examples.from_arrays("mine", texts, CLASSES), by_hand):
        assert values.fetched(examples, [3, 0, 2])[0].tolist() == [words[i].encode() for i in (3, 0, 2)]
    prints = {Examples.from_arrays("mine", array, CLASSES).fingerprint for array in (texts, np.array(words))}
    assert len(prints) == 1


def test_objects_are_the_numbers_or_rows_that_they_hold():
    rows = np.empty(6, object)
    rows[:] = list(ROWS)
    for features, expected in ((ROWS.astype(object), ROWS), (rows, ROWS), ([decimal.Decimal("1.5")] * 6, [1.5] * 6)):
        np.testing.assert_array_equal(Examples.from_arrays("mine", features, CLASSES).first(6)[0], expected)


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ([[1, 2], [3, None], *[[0, 0]] * 4], r"\[1, 1\] is None, among numbers\. Fill in what is missing"),
        (["a", "b", np.nan, "c", "d", "e"], r"\[2\] is nan \(float\), among texts"),
        ([[0]] * 5 + [[0, 1]], "its rows differ in length"),
        (np.arange(6).astype("datetime64[D]"), r"datetime64\[D\] is no type of a tensor"),
    ],
)
def test_arrays_that_no_tensor_holds_are_refused_by_name_and_place(features, reason):
    if not isinstance(features, np.ndarray) and "rows" not in reason:
        features = np.array(features, object)
    with pytest.raises(DataError, match=f"^mine: features of: {reason}"):
        Examples.from_arrays("mine", {"x": ROWS, "of": features}, CLASSES)


def test_labels_may_be_the_names_of_classes():
    words = np.array(["ja", "näh", "ja", "ja", "näh", "ja"])
    for labels in (words, words.astype(object), words.tolist()):
        examples = Examples.from_arrays("mine", ROWS, labels)
        assert (examples.class_names, examples.labels.tolist()) == (("ja", "näh"), [0, 1, 0, 0, 1, 0])
    other = Examples.from_arrays("mine", ROWS, words, ["vielleicht", "näh", "ja"])
    assert other.labels.tolist() == values.fetched(other, range(6))[1].tolist() == [2, 1, 2, 2, 1, 2]
    with pytest.raises(DataError, match="a label 'näh', which is none of the class_names"):
        Examples.from_arrays("mine", ROWS, words, ["ja", "nein"])
    with pytest.raises(DataError, match="labels are numbers as texts, such as '1.5'"):
        Examples.from_arrays("mine", ROWS, ["1.5", "2", "3", "4", "5", "6"])


def test_labels_may_be_of_several_classes_at_once():
    labels = np.array([[0, 0], [1, 1], [0, 1], [1, 0], [0, 0], [1, 1]])
    assert Examples.from_arrays("mine", ROWS, labels, ["wet", "cold"]).labels is not None
    with pytest.raises(DataError, match="labels are one-hot, of shape .*labels.argmax"):
        Examples.from_arrays("mine", ROWS, np.eye(2)[CLASSES], ["no", "yes"])
    with pytest.raises(DataError, match=r"or 0 and 1 of shape \(n, 2\) of several"):
        Examples.from_arrays("mine", ROWS, 2 * labels, ["wet", "cold"])


def test_a_class_has_one_number_in_all_splits():
    train, test = (Examples.from_arrays(name, ROWS, CLASSES, [*name]) for name in ("abc", "acb"))
    train.check_same_classes("train", ("a", "b", "c"))
    with pytest.raises(DataError, match="^acb: label 1 is c, and in abc b. Give both the same class_names"):
        test.check_same_classes(train.name, train.class_names)
    with pytest.raises(DataError, match="label 2 is no class, and in abc c"):
        Examples.from_arrays("two", ROWS, CLASSES, ["a", "b"]).check_same_classes(train.name, train.class_names)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([0.0] * 6, r"got labels numpy array float64 \(6,\)"),
        ([[0]] * 6, r"got labels numpy array int64 \(6, 1\)"),
        ([0, 1, 2, 0, 0, 5], "there is a label 2; labels are 0 to 1"),
    ],
)
def test_labels_that_are_no_classes_are_refused_where_classes_have_names(labels, reason):
    with pytest.raises(DataError, match=f"^mine: {reason}"):
        Examples.from_arrays("mine", ROWS, np.array(labels), ["no", "yes"])
    Examples.from_arrays("mine", ROWS, np.array(labels))


@pytest.mark.parametrize(("features", "labels"), [((3, 2), (4,)), ((0, 2), (0,)), ((3,), ())])
def test_arrays_of_different_or_no_length_are_refused_with_their_shapes(features, labels):
    with pytest.raises(DataError) as error:
        Examples.from_arrays("mine", np.zeros(features), np.zeros(labels))
    assert str(error.value).startswith(f"mine: got features of shape {features} and labels of shape {labels};")


def test_mistakes_in_a_fetch_are_its_own():
    with pytest.raises(GraphError, match=r"mine: fetch returned tensor float64 \(4, 2\). Let it return"):
        Examples("mine", 6, lambda: lambda indices: tf.gather(ROWS, indices)).first(4)
    with pytest.raises(NameError):
        Examples("mine", 6, lambda: lambda indices: (tf.gather(missing, indices), 0)).first(4)  # noqa: F821


@pytest.mark.parametrize(
    ("workload", "count"),
    [
        (toy_workload.WORKLOAD, 1000),
        (IN_ORDER, 1),
        (element_workloads.workload(element_workloads.ending_uncounted), 1000),
    ],
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
