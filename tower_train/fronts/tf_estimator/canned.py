"""Canned estimators: models of feature columns that are ready to train.

Names, arguments, defaults and variables are those of TensorFlow 1.15. Common arguments:

Args:
  feature_columns: tf.feature_column's columns; those of a DNN must be dense (indicator_column and embedding_column make
    categories dense).
  hidden_units: over layers of a DNN, their numbers of units.
  model_dir, config, warm_start_from: as of Estimator.
  n_classes: number of classes.
  label_dimension: numbers that a regressor predicts for each example.
  weight_column: name of the feature that weighs the loss of each example, or its numeric_column.
  label_vocabulary: over classes, their names, if labels are strings.
  optimizer: Adagrad, Adam, Ftrl, RMSProp or SGD, with the learning rate of 1.15; an optimizer of tf.compat.v1.train or
    of Keras; or a function that returns one.
  activation_fn: of each layer of a DNN.
  dropout: share of a layer's outputs that is dropped in training. Towers draw their own.
  batch_norm: whether to normalise the outputs of each layer, by the batch of each tower.
  sparse_combiner: "sum", "mean" or "sqrtn", for columns with several categories in an example.
  loss_reduction: a tf.compat.v1.losses.Reduction. A sum is taken over the batches of all towers; a mean is the mean of
    the towers' means.
  partitioner, input_layer_partitioner: only None: there are no parameter servers.

Raises:
  ConfigError: wrong arguments; the message says what is allowed.
"""

import math

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator.class_heads import class_head
from tower_train.fronts.tf_estimator.feature_columns import checked
from tower_train.fronts.tf_estimator.heads import regression_head
from tower_train.fronts.tf_estimator.network_parts import Constant, Deep, Linear, Part, model_fn_of
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

_SUM = tf.compat.v1.losses.Reduction.SUM
# Learning rates of optimizers given by their names, from 1.15's canned/{dnn,linear,dnn_linear_combined,baseline}.py.
_DEEP_RATE, _LINEAR_RATE, _COMBINED_DEEP_RATE, _COMBINED_LINEAR_RATE, _BASELINE_RATE = 0.05, 0.2, 0.001, 0.005, 0.3


class DNNClassifier(Estimator):
    """Classifies by fully connected layers."""

    def __init__(
        self, hidden_units, feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None,
        optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None, input_layer_partitioner=None, config=None,
        warm_start_from=None, loss_reduction=_SUM, batch_norm=False,
    ):  # fmt: skip
        _check_no_partitioner(input_layer_partitioner)
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        columns = checked("feature_columns", feature_columns)
        deep = Deep(optimizer, _DEEP_RATE, columns, hidden_units, activation_fn, dropout, batch_norm)
        super().__init__(model_fn_of(head, deep), model_dir, config, warm_start_from=warm_start_from)


class DNNRegressor(Estimator):
    """Predicts numbers by fully connected layers."""

    def __init__(
        self, hidden_units, feature_columns, model_dir=None, label_dimension=1, weight_column=None,
        optimizer="Adagrad", activation_fn=tf.nn.relu, dropout=None, input_layer_partitioner=None, config=None,
        warm_start_from=None, loss_reduction=_SUM, batch_norm=False,
    ):  # fmt: skip
        _check_no_partitioner(input_layer_partitioner)
        head = regression_head(label_dimension, weight_column, loss_reduction)
        columns = checked("feature_columns", feature_columns)
        deep = Deep(optimizer, _DEEP_RATE, columns, hidden_units, activation_fn, dropout, batch_norm)
        super().__init__(model_fn_of(head, deep), model_dir, config, warm_start_from=warm_start_from)


class LinearClassifier(Estimator):
    """Classifies by weighted sums of features."""

    def __init__(
        self, feature_columns, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None,
        optimizer="Ftrl", config=None, partitioner=None, warm_start_from=None, loss_reduction=_SUM,
        sparse_combiner="sum",
    ):  # fmt: skip
        _check_no_partitioner(partitioner)
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        columns = checked("feature_columns", feature_columns)
        linear = Linear(optimizer, _LINEAR_RATE, columns, sparse_combiner)
        super().__init__(model_fn_of(head, linear), model_dir, config, warm_start_from=warm_start_from)


class LinearRegressor(Estimator):
    """Predicts numbers by weighted sums of features."""

    def __init__(
        self, feature_columns, model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl", config=None,
        partitioner=None, warm_start_from=None, loss_reduction=_SUM, sparse_combiner="sum",
    ):  # fmt: skip
        _check_no_partitioner(partitioner)
        head = regression_head(label_dimension, weight_column, loss_reduction)
        columns = checked("feature_columns", feature_columns)
        linear = Linear(optimizer, _LINEAR_RATE, columns, sparse_combiner)
        super().__init__(model_fn_of(head, linear), model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedClassifier(Estimator):
    """Classifies by the sum of a linear model and of fully connected layers ("wide and deep")."""

    def __init__(
        self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl", dnn_feature_columns=None,
        dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu, dnn_dropout=None, n_classes=2,
        weight_column=None, label_vocabulary=None, input_layer_partitioner=None, config=None, warm_start_from=None,
        loss_reduction=_SUM, batch_norm=False, linear_sparse_combiner="sum",
    ):  # fmt: skip
        _check_no_partitioner(input_layer_partitioner)
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        deep = (dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm)
        linear = (linear_optimizer, linear_sparse_combiner)
        parts = _wide_and_deep(linear_feature_columns, linear, dnn_feature_columns, deep)
        super().__init__(model_fn_of(head, *parts), model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedRegressor(Estimator):
    """Predicts numbers by the sum of a linear model and of fully connected layers."""

    def __init__(
        self, model_dir=None, linear_feature_columns=None, linear_optimizer="Ftrl", dnn_feature_columns=None,
        dnn_optimizer="Adagrad", dnn_hidden_units=None, dnn_activation_fn=tf.nn.relu, dnn_dropout=None,
        label_dimension=1, weight_column=None, input_layer_partitioner=None, config=None, warm_start_from=None,
        loss_reduction=_SUM, batch_norm=False, linear_sparse_combiner="sum",
    ):  # fmt: skip
        _check_no_partitioner(input_layer_partitioner)
        head = regression_head(label_dimension, weight_column, loss_reduction)
        deep = (dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm)
        linear = (linear_optimizer, linear_sparse_combiner)
        parts = _wide_and_deep(linear_feature_columns, linear, dnn_feature_columns, deep)
        super().__init__(model_fn_of(head, *parts), model_dir, config, warm_start_from=warm_start_from)


class BaselineClassifier(Estimator):
    """Learns the frequency of each class, whatever the features: the least that a classifier must surpass."""

    def __init__(
        self, model_dir=None, n_classes=2, weight_column=None, label_vocabulary=None, optimizer="Ftrl", config=None,
        loss_reduction=_SUM,
    ):  # fmt: skip
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(model_fn_of(head, Constant(optimizer, _BASELINE_RATE)), model_dir, config)


class BaselineRegressor(Estimator):
    """Learns the mean of the labels, whatever the features."""

    def __init__(
        self, model_dir=None, label_dimension=1, weight_column=None, optimizer="Ftrl", config=None,
        loss_reduction=_SUM,
    ):  # fmt: skip
        head = regression_head(label_dimension, weight_column, loss_reduction)
        super().__init__(model_fn_of(head, Constant(optimizer, _BASELINE_RATE)), model_dir, config)


def _wide_and_deep(linear_columns, linear: tuple, deep_columns, deep: tuple) -> list[Part]:
    """Returns the parts that have columns; a tuple holds its part's other arguments, without the rate."""
    parts = []
    if deep_columns:
        optimizer, *others = deep
        parts.append(Deep(optimizer, _COMBINED_DEEP_RATE, checked("dnn_feature_columns", deep_columns), *others))
    if linear_columns:
        optimizer, *others = linear
        columns = checked("linear_feature_columns", linear_columns)
        parts.append(Linear(optimizer, min(_COMBINED_LINEAR_RATE, 1 / math.sqrt(len(columns))), columns, *others))
    if not parts:
        raise errors.ConfigError("Give linear_feature_columns or dnn_feature_columns, or both; got none.")
    return parts


def _check_no_partitioner(partitioner) -> None:
    if partitioner is not None:
        raise errors.ConfigError(
            "A partitioner spreads variables over parameter servers, which there are none of here. Leave it out."
        )
