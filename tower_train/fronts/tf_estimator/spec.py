"""The record that a model_fn returns, and its checks."""

from typing import Any, NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import eval_metrics

v1 = tf.compat.v1
_HOOKS = ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks")


class ModeKeys:
    """The purposes of a call of model_fn; the values are those of TensorFlow 1.15."""

    TRAIN, EVAL, PREDICT = "train", "eval", "infer"


_NEEDED = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",), None: ()}


class _Spec(NamedTuple):
    mode: str | None
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
      mode: a ModeKeys value; None in a model_fn that does not take it.
      predictions: a tensor or a dict of tensors [batch, ...].
      loss: one number of any shape, such as [], [1] or [None, 1]; for TRAIN and EVAL.
      train_op: does a step; for TRAIN.
      eval_metric_ops: {name: (value, update_op)}, as of tf.compat.v1.metrics, or Keras metrics after update_state.
      export_outputs: {signature: tower_train.estimator.export.PredictOutput, ...}; for PREDICT, by default the
        predictions.
      training_chief_hooks, training_hooks: further session hooks for training.
      scaffold: initialises and saves the variables.
      evaluation_hooks, prediction_hooks: further session hooks for evaluation and prediction.

    Raises:
      GraphError: a field is missing for this mode, is of another kind or of another graph.
    """

    __slots__ = ()

    def __new__(cls, mode, *args, **kwargs):
        spec = super().__new__(cls, mode, *args, **kwargs)
        if mode not in _NEEDED:
            raise errors.GraphError(f"EstimatorSpec: mode={mode!r}; pass on the mode that model_fn was given.")
        missing = [name for name in _NEEDED[mode] if getattr(spec, name) is None]
        if missing:
            raise errors.GraphError(
                f"EstimatorSpec for mode {mode!r} has no {' and no '.join(missing)}. model_fn must give "
                f"{' and '.join(_NEEDED[mode])} in this mode."
            )
        checked = {name: _hooks(name, getattr(spec, name)) for name in _HOOKS}
        if spec.train_op is not None:
            _check_of_graph("train_op", spec.train_op, (tf.Operation, tf.Tensor, tf.Variable))
        if spec.loss is not None:
            checked["loss"] = _scalar(spec.loss)
        predictions = spec.predictions if isinstance(spec.predictions, dict) else {"": spec.predictions}
        for key, tensor in predictions.items():
            if tensor is not None:
                _check_of_graph(f"predictions[{key!r}]" if key else "predictions", tensor, (tf.Tensor, tf.Variable))
        checked["eval_metric_ops"] = eval_metrics.checked(spec.eval_metric_ops)
        if mode == ModeKeys.PREDICT:
            checked["export_outputs"] = _export_outputs(spec.export_outputs, spec.predictions)
        checked["scaffold"] = spec.scaffold or v1.train.Scaffold()
        if not isinstance(checked["scaffold"], v1.train.Scaffold):
            raise errors.GraphError(
                f"EstimatorSpec: scaffold is {spec.scaffold!r}; it must be a tf.compat.v1.train.Scaffold."
            )
        return _Spec._replace(spec, **checked)

    def _replace(self, **changes) -> "EstimatorSpec":
        """Returns a copy with other fields, checked alike; GraphError also if the mode would change."""
        fields = self._asdict() | changes
        if fields["mode"] != self.mode:
            raise errors.GraphError(
                f"EstimatorSpec: the mode {self.mode!r} cannot become {fields['mode']!r}. Make a new EstimatorSpec."
            )
        return EstimatorSpec(**fields)


def _check_of_graph(name: str, value, kinds: tuple) -> None:
    """Raises GraphError for a value of another kind, or of another graph than the default one."""
    if not isinstance(value, kinds):
        raise errors.GraphError(
            f"EstimatorSpec: {name} is {value!r}; it must be a {' or '.join(f'tf.{kind.__name__}' for kind in kinds)}."
        )
    if not tf.executing_eagerly() and value.graph is not v1.get_default_graph():
        raise errors.GraphError(
            f"EstimatorSpec: {name} ({value.name}) is of another graph. Make it within this call of model_fn."
        )


def _scalar(loss) -> tf.Tensor:
    if not isinstance(loss, (tf.Tensor, tf.Variable)):
        raise errors.GraphError(f"EstimatorSpec: loss is {loss!r}; it must be a tf.Tensor.")
    _check_of_graph("loss", loss, (tf.Tensor, tf.Variable))
    with tf.control_dependencies(None):  # the caller may be in those of the train_op
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank == 0:
            return loss
        if loss.shape.num_elements() in (None, 1):  # unknown: there must be one number in it when it runs
            return tf.reshape(loss, [])
    raise errors.GraphError(
        f"EstimatorSpec: loss has shape {loss.shape}; it must be a scalar. Reduce it with tf.reduce_mean."
    )


def _hooks(name: str, hooks) -> tuple:
    hooks = tuple(hooks or ())
    for hook in hooks:
        if not isinstance(hook, v1.train.SessionRunHook):
            raise errors.GraphError(
                f"EstimatorSpec: {name} holds {hook!r}; each must be a tf.compat.v1.train.SessionRunHook."
            )
    return hooks


def _export_outputs(outputs, predictions) -> dict:
    try:
        return compat.get_export_outputs(outputs, predictions)
    except (TypeError, ValueError) as error:
        raise errors.GraphError(f"EstimatorSpec: export_outputs cannot be exported: {error}") from None
