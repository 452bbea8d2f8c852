"""The record that a model_fn returns."""

from typing import Any, NamedTuple

import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1


class ModeKeys:
    """The purposes of a call of model_fn; the values are those of TensorFlow 1.15."""

    TRAIN, EVAL, PREDICT = "train", "eval", "infer"


class _Spec(NamedTuple):
    mode: str
    predictions: Any = None
    loss: tf.Tensor | None = None
    train_op: tf.Operation | tf.Tensor | None = None
    eval_metric_ops: dict | None = None
    export_outputs: dict | None = None
    training_chief_hooks: tuple = ()
    training_hooks: tuple = ()
    scaffold: v1.train.Scaffold | None = None
    evaluation_hooks: tuple = ()
    prediction_hooks: tuple = ()


class EstimatorSpec(_Spec):
    """The ops of a model.

    Args:
      mode: a ModeKeys value.
      predictions: a tensor or a dict of tensors [batch, ...].
      loss: scalar, or of shape [1]; for TRAIN and EVAL.
      train_op: does a step; for TRAIN.
      eval_metric_ops: {name: (value, update_op)}, as tf.compat.v1.metrics returns them.
      export_outputs: {signature: tower_train.estimator.export.PredictOutput, ...}.
      training_chief_hooks: further session hooks for training.
      training_hooks: more of them.
      scaffold: initialises and saves the variables.
      evaluation_hooks: further session hooks for evaluation.
      prediction_hooks: and for prediction.

    Raises:
      GraphError: a field is missing for this mode, or is of another kind.
    """

    __slots__ = ()

    def __new__(cls, mode, *args, **kwargs):
        spec = super().__new__(cls, mode, *args, **kwargs)
        if mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT):
            raise errors.GraphError(f"EstimatorSpec: mode={mode!r}; pass on the mode that model_fn was given.")
        needed = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        missing = [name for name in needed[mode] if getattr(spec, name) is None]
        if missing:
            raise errors.GraphError(
                f"EstimatorSpec for mode {mode!r} has no {' and no '.join(missing)}. model_fn must give "
                f"{' and '.join(needed[mode])} in this mode."
            )
        if spec.loss is not None:
            spec = spec._replace(loss=_scalar(spec.loss))
        for name, metric in (spec.eval_metric_ops or {}).items():
            if not isinstance(metric, tuple) or len(metric) != 2:
                raise errors.GraphError(
                    f"eval_metric_ops[{name!r}] is a {type(metric).__name__}; it must be a pair (value, update_op), as "
                    "tf.compat.v1.metrics.mean and its like return."
                )
        return spec


def _scalar(loss) -> tf.Tensor:
    with tf.control_dependencies(None):  # the caller may be within those of the train_op
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank == 0:
            return loss
        if loss.shape.num_elements() == 1:
            return tf.reshape(loss, [])
    raise errors.GraphError(
        f"EstimatorSpec: loss has shape {loss.shape}; it must be a scalar. Reduce it with tf.reduce_mean."
    )
