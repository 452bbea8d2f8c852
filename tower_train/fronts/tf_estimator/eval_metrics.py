"""The metrics of a model_fn: checked, and Keras metrics as pairs of ops like all others."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import captured

v1 = tf.compat.v1
LOCAL = (v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES)
_OWN = {"global_step": "the step of the checkpoint", "loss": "the mean of the losses"}  # what each evaluation gives


def checked(metrics: dict | None) -> dict | None:
    """Returns metrics as {name: (value, update_op)}. Raises GraphError for a metric of another kind or of another
    graph, or a Keras metric that is not updated exactly once."""
    if metrics is None:
        return None
    if not isinstance(metrics, dict):
        raise errors.GraphError(f"eval_metric_ops is {metrics!r}; it must be a dict {{name: (value, update_op)}}.")
    return {name: _pair(name, metric) for name, metric in metrics.items()}


def check_names(metrics: dict | None) -> None:
    """Raises GraphError if a metric has the name of a result that each evaluation has anyway."""
    for name in _OWN.keys() & (metrics or {}).keys():
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}] would hide {_OWN[name]}, which each evaluation gives by this name. Rename it."
        )


def _pair(name: str, metric):
    if isinstance(metric, keras.Metric):
        _check_graph(name, [v.value for v in metric.variables])
        _make_local(metric)
        return metric if captured.current() is None else (metric.result(), _update(name, metric))
    if not isinstance(metric, tuple) or len(metric) != 2:
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}] is a {type(metric).__name__}; it must be a pair (value, update_op), as "
            "tf.compat.v1.metrics.mean and its like return, or a Keras metric."
        )
    _check_graph(name, tf.nest.flatten(metric))
    return metric


def _check_graph(name: str, parts: list) -> None:
    for part in parts:
        if not tf.executing_eagerly() and getattr(part, "graph", None) is not v1.get_default_graph():
            raise errors.GraphError(
                f"eval_metric_ops[{name!r}] holds {part!r}, which is not of this graph. Make the metric within this "
                "call of model_fn."
            )


def _make_local(metric: keras.Metric) -> None:
    """Resets a Keras metric's variables for each evaluation, and keeps them out of checkpoints."""
    graph = v1.get_default_graph()
    mine = {id(v.value): v.value for v in metric.variables}
    for key in (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.TRAINABLE_VARIABLES):
        collection = graph.get_collection_ref(key)
        collection[:] = [variable for variable in collection if id(variable) not in mine]
    for key in LOCAL:
        there = {id(variable) for variable in graph.get_collection(key)}
        graph.get_collection_ref(key).extend(v for i, v in mine.items() if i not in there)


def _update(name: str, metric: keras.Metric) -> tf.Operation:
    """Returns what update_state has assigned; Keras does not run that in a graph."""
    mine = {id(variable.value) for variable in metric.variables}
    found = [(variable, value) for variable, value in captured.current().assigned if id(variable) in mine]
    if not found:
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}]: this Keras metric was not updated. Call its update_state(labels, values) in "
            "model_fn."
        )
    if len(found) != len({id(variable) for variable, _ in found}):
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}]: update_state was called more than once in a model_fn, where each call would "
            "begin at the same values. Join the tensors, or use several metrics."
        )
    return captured.assign(found)
