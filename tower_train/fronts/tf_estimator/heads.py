"""The heads of canned estimators: predictions, losses, metrics and export signatures from logits."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import ClassVar

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import feature_columns
from tower_train.fronts.tf_estimator.receivers import SERVING, PredictOutput, RegressionOutput
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys

v1 = tf.compat.v1
metrics, Reduction = v1.metrics, v1.losses.Reduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The part of a model behind its logits.

    Attributes:
      units: numbers in the logits of an example.
      label_dimension: numbers in the label of an example.
      weight_column: the numeric column of example weights, or None.
      loss_reduction: from examples' losses to the batch's, a tf.compat.v1.losses.Reduction.
    """

    units: int = 1
    label_dimension: int = 1
    weight_column: tuple | None = None
    loss_reduction: str = Reduction.SUM

    has_weights_per_logit: ClassVar[bool] = False

    def __post_init__(self):
        allowed = sorted(set(Reduction.all()) - {Reduction.NONE})
        if self.loss_reduction not in allowed:
            raise errors.ConfigError(f"loss_reduction={self.loss_reduction!r}; it must be one of {allowed}.")

    def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the predictions for each example, by 1.15's names."""
        raise NotImplementedError

    def signatures(self, predictions: dict[str, tf.Tensor]) -> dict:
        """Returns the export signatures except 'predict'."""
        raise NotImplementedError

    def losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns labels as numbers, and each example's loss [batch, label_dimension]."""
        raise NotImplementedError

    def own_metrics(self, predictions: dict[str, tf.Tensor], labels: tf.Tensor, weights) -> dict:
        """Returns the metrics of this kind of head, {name: (value, update_op)}."""
        raise NotImplementedError

    def spec(self, features, labels, mode: str, logits: tf.Tensor, minimize: Callable, towers: int) -> EstimatorSpec:
        """Returns the spec of a model.

        Args:
          features, labels, mode: those of model_fn.
          logits: [batch, units].
          minimize: loss -> op that does a step.
          towers: those of all workers in TRAIN: their mean of loss is the sum of all examples' losses, if it is a sum.

        Raises:
          DataError: labels or weights of another shape or type.
        """
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            outputs = self.signatures(predictions) | {"predict": PredictOutput(predictions)}
            return EstimatorSpec(mode, predictions, export_outputs=outputs)
        labels, losses = self.losses(_columns("labels", labels, self.label_dimension, logits), logits)
        weights = self._weights(features, logits)
        loss = v1.losses.compute_weighted_loss(losses, weights, None, None, self.loss_reduction)
        if mode == ModeKeys.EVAL:
            found = {"average_loss": metrics.mean(losses, weights), **self.own_metrics(predictions, labels, weights)}
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=found)
        if self.loss_reduction == Reduction.SUM:
            v1.summary.scalar("average_loss", loss / tf.reduce_sum(weights * tf.ones_like(losses)))
            loss *= towers
        return EstimatorSpec(mode, predictions, loss, minimize(loss))

    def _weights(self, features, logits: tf.Tensor) -> tf.Tensor | float:
        column = self.weight_column
        if column is None:
            return 1.0
        feature_columns.check_features(features, (column,))
        weights = tf.convert_to_tensor(features[column.key])
        weights = column.normalizer_fn(weights) if column.normalizer_fn else weights
        if not (weights.dtype.is_floating or weights.dtype.is_integer):
            raise errors.DataError(
                f"The weights {column.key!r} are of type {weights.dtype.name}; they must be numbers."
            )
        weights = tf.cast(weights, tf.float32)
        is_per_logit = self.has_weights_per_logit and weights.shape.rank == 2 and weights.shape[1] == self.units
        return _columns(f"the weights {column.key!r}", weights, self.units if is_per_logit else 1, logits)


class RegressionHead(Head):
    """Numbers, with the squared error as loss."""

    has_weights_per_logit = True

    def predictions(self, logits):
        return {"predictions": logits}

    def signatures(self, predictions):
        output = RegressionOutput(predictions["predictions"])
        return {SERVING: output, "regression": output}

    def losses(self, labels, logits):
        if labels.dtype == tf.string:
            raise errors.DataError("labels are strings; a regressor needs numbers.")
        labels = tf.cast(labels, tf.float32)
        return labels, tf.math.squared_difference(logits, labels)

    def own_metrics(self, predictions, labels, weights):
        return {
            "prediction/mean": metrics.mean(predictions["predictions"], weights),
            "label/mean": metrics.mean(labels, weights),
        }


def regression_head(label_dimension: int, weight_column, loss_reduction: str) -> Head:
    """Returns the head of a regressor; ConfigError for labels without numbers."""
    if not isinstance(label_dimension, numbers.Integral) or label_dimension < 1:
        raise errors.ConfigError(f"label_dimension={label_dimension!r}; it must be at least 1.")
    return RegressionHead(
        units=label_dimension, label_dimension=label_dimension,
        weight_column=feature_columns.weight_of(weight_column), loss_reduction=loss_reduction,
    )  # fmt: skip


def _columns(what: str, values, width: int, logits: tf.Tensor) -> tf.Tensor:
    """Returns [batch] or [batch, width] as [batch, width]; an op checks that the batch is that of logits."""
    if values is None or isinstance(values, (dict, tf.SparseTensor)):
        raise errors.DataError(f"{what} must be a tensor; got a {type(values).__name__}. Look at input_fn's results.")
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 1 and width == 1:
        values = values[:, tf.newaxis]
    if values.shape.rank not in (2, None) or (values.shape.rank and values.shape[1] not in (width, None)):
        raise errors.DataError(f"{what} have the shape {values.shape.as_list()}; it must be {[None, width]}.")
    is_same = v1.assert_equal(
        tf.shape(values), [tf.shape(logits)[0], width], message=f"{what} do not fit the features."
    )
    with tf.control_dependencies([is_same]):
        return tf.ensure_shape(values, [None, width])
