"""numpy_input_fn and pandas_input_fn keep what TensorFlow 1.15 documented, on one tower and on several."""

import numpy as np
import pytest
import regression
import tensorflow as tf

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
numpy_input_fn, pandas_input_fn = tf_estimator.inputs.numpy_input_fn, tf_estimator.inputs.pandas_input_fn


class Column:
    """A pandas.Series, as far as input functions know one."""

    def __init__(self, values, index=None):
        self.values, self.index = np.asarray(values), np.arange(len(values)) if index is None else index

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


class Frame:
    """A pandas.DataFrame, likewise: pandas is not installed where these tests run."""

    def __init__(self, columns, index=None):
        self._columns, self.columns = columns, list(columns)
        self.index = np.arange(len(next(iter(columns.values())))) if index is None else index

    def __getitem__(self, column):
        return Column(self._columns[column], self.index)


def drawn(input_fn, most=100):
    """The batches that a session gets of the tensors of a call in a graph, until the input ends."""
    batches = []
    with tf.Graph().as_default(), v1.Session() as session:
        tensors = input_fn()
        while len(batches) < most:
            try:
                batches.append(session.run(tensors))
            except tf.errors.OutOfRangeError:
                break
    return batches


def rows(batches):
    return [batch.tolist() for batch in batches]


class TestNumpyInputFn:
    @pytest.mark.parametrize(
        ("count", "batch", "epochs", "expected"),
        [
            (2, 128, 2, [[0, 1, 0, 1]]),
            (4, 2, 0, []),
            (3, 2, 3, [[0, 1], [2, 0], [1, 2], [0, 1], [2]]),
            (3, 2, None, [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]]),
        ],
    )
    def test_batches_go_on_over_the_ends_of_epochs(self, count, batch, epochs, expected):
        x = np.arange(count)
        assert rows(drawn(numpy_input_fn(x, None, batch, epochs, False), most=5)) == expected

    def test_shuffled_epochs_hold_each_row_once_in_another_order(self):
        x = np.arange(40)
        epochs = drawn(numpy_input_fn({"x": x}, x, batch_size=40, num_epochs=3, shuffle=True))
        orders = {tuple(labels) for _, labels in epochs}
        assert len(orders) == 3 and {tuple(sorted(order)) for order in orders} == {tuple(x)}
        for features, labels in epochs:
            np.testing.assert_array_equal(features["x"], labels)

    def test_forms_of_x_and_y_are_kept(self):
        x, y = np.arange(16.0).reshape(4, 2, 2), {"y1": np.arange(4), "y2": np.array(list("abcd"))}
        [(features, labels)] = drawn(numpy_input_fn(x, y, shuffle=False))
        np.testing.assert_array_equal(features, x)
        assert labels["y1"].tolist() == [0, 1, 2, 3] and labels["y2"].tolist() == [b"a", b"b", b"c", b"d"]
        [features] = drawn(numpy_input_fn({"__target_key__": np.arange(2)}, shuffle=False))
        assert features["__target_key__"].tolist() == [0, 1]

    def test_mistakes_are_the_librarys(self):
        for x, y, shuffle, error in [
            (list(range(4)), None, False, TypeError),
            ({}, None, False, ValueError),
            ({"a": np.arange(4)}, np.arange(10), False, ValueError),
            (np.arange(4), np.arange(4), None, ValueError),
        ]:
            with pytest.raises(error):
                numpy_input_fn(x, y, shuffle=shuffle)

    def test_towers_train_on_its_batches(self, tmp_path):
        input_fn = numpy_input_fn(
            {"x": regression.X}, regression.Y, regression.BATCH, num_epochs=None, shuffle=False, num_threads=4
        )
        estimator = regression.make(tmp_path, 2).train(input_fn, steps=9)
        expected = regression.expected_weights(9, 2)
        np.testing.assert_allclose(regression.weights_of(estimator), expected, atol=1e-12)


class TestPandasInputFn:
    X = Frame({"a": [0, 1, 2, 3], "body": np.array(["x", "y", "x", "y"], object)}, np.arange(100, 104))
    Y = Column([-32, -31, -30, -29], np.arange(100, 104))

    def test_gives_columns_as_features_and_the_series_as_labels(self):
        batches = drawn(pandas_input_fn(self.X, self.Y, batch_size=3, shuffle=False))
        assert rows(features["a"] for features, _ in batches) == [[0, 1, 2], [3]]
        assert rows(features["body"] for features, _ in batches) == [[b"x", b"y", b"x"], [b"y"]]
        assert rows(labels for _, labels in batches) == [[-32, -31, -30], [-29]]
        assert set(batches[0][0]) == {"a", "body"}

    def test_a_frame_of_labels_may_have_the_names_of_features(self):
        y = Frame({"a": [10, 11, 12, 13], "b": [50, 51, 52, 53]}, self.X.index)
        [(features, labels)] = drawn(pandas_input_fn(self.X, y, shuffle=False))
        assert features["a"].tolist() == [0, 1, 2, 3]
        assert {name: values.tolist() for name, values in labels.items()} == {
            "a": [10, 11, 12, 13], "b": [50, 51, 52, 53],
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"y": Column([1, 2, 3, 4])}, "x and y must have the same index"),
            ({"target_column": "a", "y": Y}, "x has a column 'a'"),
        ],
    )
    def test_labels_that_do_not_match_are_refused(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            pandas_input_fn(self.X, shuffle=False, **kwargs)
