"""Losses and metrics that come with the trainer, and the direction in which they get better."""

import tensorflow as tf

from tower_train import errors

MIN, MAX = "min", "max"
MODES = {"precision @ 1": MAX, "precision @ 5": MAX, "absolute error": MIN, "squared error": MIN}


def classification_metrics(logits: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
    """Computes per-example precision @ 1, and @ 5 if there are more than five classes, of floating point logits [batch,
    classes] and integer labels [batch]: {metric name: float32 [batch] of zeros and ones}.

    A class whose logit equals the right one's, or either of which is NaN, ranks above it. Raises GraphError for other
    shapes, or labels that are not integers.
    """
    labels = _checked_classes("classification_metrics", logits, labels)
    right = tf.gather(logits, labels, batch_dims=1)[:, tf.newaxis]
    # Not tf.math.in_top_k: it counts a tie as a hit, so equal logits for all classes as perfect.
    # Nor by `not <`, which TensorFlow turns into `>=`, which is false for NaN.
    rank = logits.shape[-1] - tf.reduce_sum(tf.cast(logits < right, tf.int32), axis=1)
    ranks = [1, 5] if logits.shape[-1] > 5 else [1]
    return {f"precision @ {k}": tf.cast(rank <= k, tf.float32) for k in ranks}


def softmax_cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0, weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the mean of `softmax_cross_entropies`. Weights [batch] multiply the examples' losses before that mean."""
    return _mean(softmax_cross_entropies(logits, labels, label_smoothing), weights)


def softmax_cross_entropies(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
    """Returns the cross-entropies, [batch, ...], between integer labels [batch, ...] and logits [batch, ..., classes].

    With label_smoothing e, a label is worth 1 - e, and e is spread evenly over all classes, the right one included
    (Szegedy et al. 2016, "Rethinking the Inception architecture", section 7). Raises GraphError for other shapes, or
    labels that are not integers.
    """
    labels = _checked_classes("softmax_cross_entropy", logits, labels)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if label_smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    return loss


def mean_squared_error(outputs: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the mean over the batch, and over the numbers of an example, of (outputs - labels)².

    Outputs are floating point [batch, ...], labels numbers of the same shape; [batch] and [batch, 1] are the same.
    Weights [batch] multiply the examples' means. Raises GraphError for other shapes.
    """
    return _mean(tf.square(_differences("mean_squared_error", outputs, labels)), weights)


def regression_metrics(outputs: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
    """Computes each example's absolute and squared error, the mean over its numbers if it has several: {metric name:
    floating point [batch]}. Outputs and labels are as for mean_squared_error."""
    differences = _differences("regression_metrics", outputs, labels)
    numbers = list(range(1, differences.shape.rank))
    return {
        "absolute error": tf.reduce_mean(tf.abs(differences), axis=numbers),
        "squared error": tf.reduce_mean(tf.square(differences), axis=numbers),
    }


def _mean(losses: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Returns the mean of losses [batch, ...], whose examples are weighed by factors [batch]."""
    if weights is None:
        return tf.reduce_mean(losses)
    return tf.reduce_mean(tf.reduce_mean(losses, list(range(1, losses.shape.rank))) * tf.cast(weights, losses.dtype))


def _checked_classes(name: str, logits, labels) -> tf.Tensor:
    """Returns integer labels in a type that TensorFlow accepts as classes; GraphError if they or the logits misfit."""
    are_tensors = tf.is_tensor(logits) and tf.is_tensor(labels)
    if not are_tensors or not labels.dtype.is_integer or not labels.shape.is_compatible_with(logits.shape[:-1]):
        advice = (
            "Let `inference` return a number for each class, or give the workload another loss and other metrics: "
            "mean_squared_error and regression_metrics for labels that are numbers."
        )
        if are_tensors and labels.dtype.is_integer and labels.shape == [*logits.shape[:-1], 1]:
            advice = "Labels in a column become such by labels[:, 0]."
        elif are_tensors and labels.shape.rank == logits.shape.rank and labels.shape.is_compatible_with(logits.shape):
            advice = "Labels that are one-hot become such by labels.argmax(axis=-1), of several classes at once " + (
                "need a loss and metrics of their own: see docs/workloads.md#losses-and-metrics."
            )
        raise errors.GraphError(
            f"{name} takes outputs [batch, classes] and integer labels [batch]; got outputs "
            f"{errors.described(logits)} and labels {errors.described(labels)}. {advice}"
        )
    return labels if labels.dtype in (tf.int32, tf.int64) else tf.cast(labels, tf.int64)


def _differences(name: str, outputs, labels) -> tf.Tensor:
    """Returns outputs - labels, [batch, ...]; GraphError if their shapes differ.

    Not by broadcasting, which makes [batch, batch] of [batch, 1] and [batch].
    """
    if tf.is_tensor(outputs) and tf.is_tensor(labels) and outputs.dtype.is_floating and labels.dtype != tf.string:
        values, wanted = (tf.squeeze(t, -1) if t.shape.rank == 2 and t.shape[1] == 1 else t for t in (outputs, labels))
        if (
            values.shape.rank
            and values.shape.is_compatible_with(wanted.shape)
            and values.shape.rank == wanted.shape.rank
        ):
            return values - tf.cast(wanted, values.dtype)
    raise errors.GraphError(
        f"{name} takes outputs in floating point and labels of the same shape, [batch] or [batch, numbers]; got "
        f"outputs {errors.described(outputs)} and labels {errors.described(labels)}. Let `inference` return one for "
        "each label."
    )
