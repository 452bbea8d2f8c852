"""Feature columns as inputs of a network: tf.feature_column's, computed by tf.compat.v1.feature_column."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """Silences TensorFlow's deprecations of its own names within this block."""

    def is_other(record: logging.LogRecord) -> bool:
        return "deprecated and will be removed" not in str(record.msg)

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*add_variable.* is deprecated")
            yield
    finally:
        logger.removeFilter(is_other)


def checked(argument: str, columns) -> tuple:
    """Returns feature columns as a tuple; ConfigError if there are none, or something else is among them."""
    try:
        columns = (columns,) if hasattr(columns, "parse_example_spec") else tuple(columns)
        _example_spec(columns)
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(f"{argument} must be a list of tf.feature_column's columns: {error}") from None
    if not columns:
        raise errors.ConfigError(f"{argument} is empty; give a column for each feature, such as numeric_column('x').")
    return columns


def check_features(features, columns: tuple) -> None:
    """Raises DataError if features are not a dict, or lack one that a column needs."""
    if not isinstance(features, dict):
        raise errors.DataError(
            f"features must be a dict of tensors, by whose names feature columns find them; got a "
            f"{type(features).__name__}. Let input_fn give {{'x': features}} and a column of 'x'."
        )
    missing = sorted(_example_spec(columns).keys() - features.keys())
    if missing:
        raise errors.DataError(
            f"There is no feature {', '.join(map(repr, missing))}, of which there is a column; input_fn gives "
            f"{', '.join(map(repr, features))}."
        )


def input_layer(features: dict, columns: tuple) -> tf.Tensor:
    """Returns dense columns side by side, [batch, width]."""
    with without_deprecations():
        return v1.feature_column.input_layer(features, columns)


def weighted_sum(features: dict, columns: tuple, units: int, sparse_combiner: str) -> tuple[tf.Tensor, dict]:
    """Returns a linear model's outputs [batch, units], and {column or 'bias': its variables}."""
    variables = {}
    with without_deprecations():
        logits = v1.feature_column.linear_model(features, columns, units, sparse_combiner, cols_to_vars=variables)
    return logits, variables


def classifier_parse_example_spec(
    feature_columns, label_key, label_dtype=tf.int64, label_default=None, weight_column=None
) -> dict:
    """Returns the features of tf.io.parse_example for a classifier: those of the columns, the label and the weight.

    Args:
      feature_columns, weight_column: as for a classifier.
      label_key: the label's name in an Example.
      label_dtype: of the label; tf.string with a label_vocabulary.
      label_default: for an Example without label; None to refuse it.

    Raises:
      ConfigError: the label or the weight is a feature too.
    """
    label = tf.io.FixedLenFeature((1,), label_dtype, label_default)
    return _with_label(feature_columns, label_key, label, weight_column)


def regressor_parse_example_spec(
    feature_columns, label_key, label_dtype=tf.float32, label_default=None, label_dimension=1, weight_column=None
) -> dict:
    """Returns the features of tf.io.parse_example for a regressor.

    Args:
      label_dimension: numbers of a label.
      others: as for classifier_parse_example_spec.
    """
    label = tf.io.FixedLenFeature((label_dimension,), label_dtype, label_default)
    return _with_label(feature_columns, label_key, label, weight_column)


def weight_of(weight_column):
    """Returns the numeric column of example weights, given as such or by its name; None for None; else ConfigError."""
    if isinstance(weight_column, str):
        with without_deprecations():
            return tf.feature_column.numeric_column(weight_column)
    if weight_column is not None and not hasattr(weight_column, "normalizer_fn"):
        raise errors.ConfigError(
            f"weight_column={weight_column!r}; it must be a feature's name or a tf.feature_column.numeric_column."
        )
    return weight_column


def _with_label(columns, label_key: str, label: tf.io.FixedLenFeature, weight_column) -> dict:
    spec = _example_spec(checked("feature_columns", columns))
    weight = weight_of(weight_column)
    weight_spec = weight.parse_example_spec if weight else {}
    for name in [label_key, *weight_spec]:
        if name in spec:
            raise errors.ConfigError(f"{name!r} is the label or the weight, and a feature too. Take its column away.")
    return {**spec, label_key: label, **weight_spec}


def _example_spec(columns: tuple) -> dict:
    with without_deprecations():
        return v1.feature_column.make_parse_example_spec(columns)
