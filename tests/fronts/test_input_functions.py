"""numpy_input_fn and pandas_input_fn keep what TensorFlow 1.15 documented, on one tower and on several."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
numpy_input_fn, pandas_input_fn = tf_estimator.inputs.numpy_input_fn, tf_estimator.inputs.pandas_input_fn


class Frame(dict):
    """A pandas.DataFrame, as far as input functions know one: pandas is not installed where these tests run."""

    columns, index = property(list), np.arange(4)


class Series(np.ndarray):
    """A pandas.Series, likewise."""

    index = np.arange(4)


def series(*values):
    return np.array(values).view(Series)


def drawn(input_fn, most=5):
    """The first batches, as lists."""
    batches = input_fn().take(most).as_numpy_iterator()
    return [tf.nest.map_structure(lambda array: array.tolist(), batch) for batch in batches]


@pytest.mark.parametrize(
    ("count", "batch", "epochs", "expected"),
    [
        (2, 128, 2, [[0, 1, 0, 1]]),
        (3, 2, 3, [[0, 1], [2, 0], [1, 2], [0, 1], [2]]),
        (3, 2, None, [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]]),
    ],
)
def test_batches_go_on_over_the_ends_of_epochs(count, batch, epochs, expected):
    assert drawn(numpy_input_fn(np.arange(count), None, batch, epochs, False)) == expected


def test_shuffled_epochs_hold_each_row_once_in_another_order():
    x = np.arange(40)
    epochs = drawn(numpy_input_fn({"x": x}, x, batch_size=40, num_epochs=3, shuffle=True))
    orders = {tuple(labels) for _, labels in epochs}
    assert len(orders) == 3 and {tuple(sorted(order)) for order in orders} == {tuple(x)}
    assert all(features["x"] == labels for features, labels in epochs)


def test_forms_of_x_and_y_are_kept_and_mistakes_are_the_librarys():
    x, y = np.arange(16.0).reshape(4, 2, 2), {"y1": np.arange(4), "y2": np.array(list("abcd"))}
    labels = {"y1": [0, 1, 2, 3], "y2": [b"a", b"b", b"c", b"d"]}
    assert drawn(numpy_input_fn(x, y, shuffle=False)) == [(x.tolist(), labels)]
    for arguments in ((list(range(4)), None), ({"a": np.arange(4)}, np.arange(10))):
        with pytest.raises((TypeError, ValueError)):
            numpy_input_fn(*arguments, shuffle=False)


def test_frames_give_their_columns_as_features_and_labels():
    x = Frame(a=series(0, 1, 2, 3), body=series(*"xyxy").astype(object))
    features = {"a": [0, 1, 2, 3], "body": [b"x", b"y", b"x", b"y"]}
    assert drawn(pandas_input_fn(x, series(5, 6, 7, 8), shuffle=False)) == [(features, [5, 6, 7, 8])]
    labels = Frame(a=series(10, 11, 12, 13), b=series(50, 51, 52, 53))  # the name of a feature too
    assert drawn(pandas_input_fn(x, labels, shuffle=False)) == [(features, {k: v.tolist() for k, v in labels.items()})]
    other = series(1, 2, 3, 4)
    other.index = np.arange(4) + 1
    with pytest.raises(ValueError, match="x and y must have the same index"):
        pandas_input_fn(x, other, shuffle=False)
    with pytest.raises(ValueError, match="x has a column 'a'"):
        pandas_input_fn(x, x["a"], shuffle=False, target_column="a")
