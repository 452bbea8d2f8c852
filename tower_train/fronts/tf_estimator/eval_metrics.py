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
      ValueError: a Keras metric that is not updated.
      GraphError: one that is updated more than once.
    """
    if not isinstance(metric, keras.Metric):
        return metric
    handle = metric.variables[0].value.handle
    if getattr(handle, "graph", None) is not v1.get_default_graph():
        return handle, handle  # which the library refuses
    _make_local(metric)
    update = _update(name, metric) if captured.current() else _update_in_graph(metric)
    if update is None:
        raise ValueError(f'Please call update_state(...) on the "{metric.name}" metric')
    return metric.result(), update


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


def _update(name: str, metric: keras.Metric) -> tf.Operation | None:
    """Returns what update_state has assigned in a model_fn; Keras does not run that in a graph."""
    mine = {id(variable.value) for variable in metric.variables}
    assigned = [(variable, value) for variable, value in captured.current().assigned if id(variable) in mine]
    if len(assigned) != len({id(variable) for variable, _ in assigned}):
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}]: update_state was called more than once in a model_fn, where each call would "
            "begin at the same values. Join the tensors, or use several metrics."
        )
    return captured.assign(assigned) if assigned else None


def _update_in_graph(metric: keras.Metric) -> tf.Operation | None:
    """Returns what update_state has assigned elsewhere."""
    variables = [variable.value for variable in metric.variables]
    ops = [
        op
        for variable in variables
        for op in variable.handle.consumers()
        if op.type.startswith("Assign") and op is not variable.initializer
    ]
    return tf.group(ops) if ops else None


library.convert_metrics(pair)
