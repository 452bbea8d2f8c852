"""The heads of canned classifiers."""

import dataclasses
import numbers

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator.feature_columns import weight_of, without_deprecations
from tower_train.fronts.tf_estimator.heads import Head
from tower_train.fronts.tf_estimator.receivers import SERVING, ClassificationOutput, RegressionOutput

v1 = tf.compat.v1
metrics = v1.metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClassHead(Head):
    """Classes.

    Attributes:
      n_classes: their number.
      label_vocabulary: their names in labels and predictions; None if labels are their numbers.
    """

    n_classes: int
    label_vocabulary: tuple[str, ...] | None = None

    def class_predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the predictions from one logit for each class."""
        ids, names = tf.range(self.n_classes), self.label_vocabulary
        names = tf.strings.as_string(ids) if names is None else tf.constant(names)
        class_ids = tf.argmax(logits, -1)[:, tf.newaxis]
        batch = tf.shape(logits)[0]
        return {
            "probabilities": tf.nn.softmax(logits),
            "class_ids": class_ids,
            "classes": tf.gather(names, class_ids),
            "all_class_ids": tf.tile(ids[tf.newaxis], [batch, 1]),
            "all_classes": tf.tile(names[tf.newaxis], [batch, 1]),
        }

    def signatures(self, predictions):
        output = ClassificationOutput(predictions["probabilities"], predictions["all_classes"])
        return {SERVING: output, "classification": output}

    def ids(self, labels: tf.Tensor) -> tf.Tensor:
        """Returns labels as numbers of classes, by any vocabulary; an op checks that they exist."""
        names = self.label_vocabulary
        if (labels.dtype == tf.string) != (names is not None):
            raise errors.DataError(
                f"labels are of type {labels.dtype.name}, and label_vocabulary={names and list(names)}. String labels "
                "need a vocabulary of their classes; numbers of classes must come without."
            )
        if names is not None:
            table = tf.lookup.KeyValueTensorInitializer(tf.constant(names), tf.range(len(names), dtype=tf.int64))
            labels = tf.lookup.StaticHashTable(table, -1).lookup(labels)
        labels = tf.cast(labels, tf.int32) if labels.dtype == tf.bool else labels
        allowed = f"label_vocabulary={list(names)}" if names else f"0 to {self.n_classes - 1}"
        message = f"A label is none of n_classes={self.n_classes}. Allowed: {allowed}."
        zero, last = (tf.cast(limit, labels.dtype) for limit in (0, self.n_classes - 1))
        checks = [
            v1.assert_less_equal(labels, last, message=message),
            v1.assert_greater_equal(labels, zero, message=message),
        ]
        with tf.control_dependencies(checks):
            return tf.identity(labels)


class MultiClassHead(_ClassHead):
    """One of several classes, with the cross entropy of their softmax as loss."""

    def predictions(self, logits):
        return {"logits": logits, **self.class_predictions(logits)}

    def losses(self, labels, logits):
        if labels.dtype.is_floating:
            raise errors.DataError(f"labels are of type {labels.dtype.name}; the numbers of classes are integers.")
        ids = self.ids(labels)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 0], logits)
        return ids, losses[:, tf.newaxis]

    def own_metrics(self, predictions, labels, weights):
        return {"accuracy": metrics.accuracy(labels, predictions["class_ids"], weights)}


class BinaryHead(_ClassHead):
    """One of two classes, with the cross entropy of the logistic function as loss. Labels may be probabilities."""

    def predictions(self, logits):
        both = tf.concat([tf.zeros_like(logits), logits], -1)
        return {"logits": logits, "logistic": tf.sigmoid(logits), **self.class_predictions(both)}

    def signatures(self, predictions):
        return super().signatures(predictions) | {"regression": RegressionOutput(predictions["logistic"])}

    def losses(self, labels, logits):
        labels = tf.cast(self.ids(labels), tf.float32)
        return labels, tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

    def own_metrics(self, predictions, labels, weights):
        logistic, class_ids = predictions["logistic"], predictions["class_ids"]
        label_mean = metrics.mean(labels, weights)
        with without_deprecations():  # they do not concern an Estimator, which updates before it reads
            curves = {"auc": metrics.auc(labels, logistic, weights)}
            curves["auc_precision_recall"] = metrics.auc(labels, logistic, weights, curve="PR")
        return {
            "accuracy": metrics.accuracy(labels, class_ids, weights),
            "precision": metrics.precision(labels, class_ids, weights),
            "recall": metrics.recall(labels, class_ids, weights),
            "prediction/mean": metrics.mean(logistic, weights),
            "label/mean": label_mean,
            "accuracy_baseline": tuple(tf.maximum(mean, 1 - mean) for mean in label_mean),
            **curves,
        }


def class_head(n_classes: int, weight_column, label_vocabulary, loss_reduction: str) -> Head:
    """Returns the head of a classifier; ConfigError for fewer than two classes, or another number of names."""
    if not isinstance(n_classes, numbers.Integral) or n_classes < 2:
        raise errors.ConfigError(f"n_classes={n_classes!r}; it must be at least 2.")
    names = label_vocabulary
    if names is not None and (not isinstance(names, (list, tuple)) or len(names) != n_classes):
        raise errors.ConfigError(f"label_vocabulary={names!r}; it must be a list of n_classes={n_classes} names.")
    kind, units = (BinaryHead, 1) if n_classes == 2 else (MultiClassHead, n_classes)
    return kind(
        units=units, weight_column=weight_of(weight_column), loss_reduction=loss_reduction,
        n_classes=n_classes, label_vocabulary=names if names is None else tuple(names),
    )  # fmt: skip
