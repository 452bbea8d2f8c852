"""Keras metrics in a model_fn, as the pairs of ops that metrics are in a graph."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import captured, library

v1 = tf.compat.v1
LOCAL = (v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES)


def pair(name: str, metric):
    """Returns a Keras metric as (value, update_op), and any other metric as it is.

    Raises:
      GraphError: a Keras metric that is not updated exactly once.
    """
    if not isinstance(metric, keras.Metric):
        return metric
    _make_local(metric)
    return metric.result(), _update(name, metric)


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
    assigned = captured.current().assigned if captured.current() else []
    found = [(variable, value) for variable, value in assigned if id(variable) in mine]
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


library.convert_metrics(pair)
