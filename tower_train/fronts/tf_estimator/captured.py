"""Takes a model_fn's changes of variables: gradients are averaged, and all is assigned once for all towers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1
LOCAL = (v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES)
_GLOBAL = (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.TRAINABLE_VARIABLES)
_current = contextvars.ContextVar("captured", default=None)


@dataclasses.dataclass
class Update:
    """One call of apply_gradients.

    Attributes:
      grads_and_vars: its arguments.
      apply: (grads_and_vars) -> op that applies these instead, and increments the global step if asked to.
      looks_itself: whether `apply` handles gradients that are not finite, as an optimizer that scales the loss does.
      placeholder: the op that the caller got. It does nothing; ops that wait for it must wait for the update. It has
        the control inputs of the caller, such as its UPDATE_OPS.
    """

    grads_and_vars: list
    apply: Callable[[list], tf.Operation]
    looks_itself: bool = False
    placeholder: tf.Operation = dataclasses.field(default_factory=lambda: tf.no_op("train"))


@dataclasses.dataclass
class Captured:
    """The changes that one call of a model_fn makes to variables, in their order.

    Attributes:
      tower, num_towers: its index among the towers of all workers, and their number.
      updates: its calls of apply_gradients.
      assigned: the variables that Keras layers and metrics assign to (moving averages, seeds, sums), each with its new
        value. In a graph Keras does not do so itself.
    """

    tower: int
    num_towers: int
    updates: list[Update] = dataclasses.field(default_factory=list)
    assigned: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)

    def record(self, *args, **kwargs) -> tf.Operation:
        """Takes one call's gradients, arguments as for `Update`, and returns its placeholder."""
        self.updates.append(Update(*args, **kwargs))
        return self.updates[-1].placeholder

    def multiply_gradients(self) -> None:
        """Multiplies gradients with num_towers, so that their mean over towers is a sum."""
        for update in self.updates:
            update.grads_and_vars = [
                (grad if grad is None else tf.math.scalar_mul(self.num_towers, grad), variable)
                for grad, variable in update.grads_and_vars
            ]


@contextlib.contextmanager
def capturing(tower: int, num_towers: int) -> Iterator[Captured]:
    """Keeps optimizers and Keras layers from changing variables within this block, which calls a model_fn."""
    captured = Captured(tower, num_towers)
    token = _current.set(captured)

    def capturing_calls(apply_gradients):
        def capture(optimizer, grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            return captured.record(pairs, lambda averaged: apply_gradients(optimizer, averaged, *args, **kwargs))

        return capture

    def assign_later(assign, variable, value):
        captured.assigned.append((variable.value, tf.cast(value, variable.value.dtype)))

    try:
        with contextlib.ExitStack() as stack:
            for optimizer in (v1.train.Optimizer, library.keras_v2.optimizers.legacy.Optimizer):
                captures = capturing_calls(optimizer.apply_gradients)
                stack.enter_context(compat.replaced(optimizer, "apply_gradients", captures))
            stack.enter_context(compat.intercepted_assignments(assign_later))
            yield captured
    finally:
        _current.reset(token)


def current() -> Captured | None:
    """Returns the record of the model_fn that is being called; None elsewhere."""
    return _current.get()


def assign(pairs) -> tf.Operation:
    """Returns the op that assigns values to variables; none if there is no input for one of the values.

    Args:
      pairs: (variable of the graph, new value).
    """
    pairs = list(pairs)
    with tf.control_dependencies([value for _, value in pairs]):
        return tf.group([variable.assign(value, read_value=False) for variable, value in pairs])


def _metric_pair(name: str, metric):
    """Returns a metric of Keras 3 that a model_fn has updated as (value, update_op), and any other as it is.

    Its variables are reset for each evaluation, and in no checkpoint.

    Raises:
      GraphError: it is not updated, or more than once.
    """
    if not isinstance(metric, keras.Metric) or not current():
        return metric
    variables = {id(v.value): v.value for v in metric.variables}
    assigned = [(variable, value) for variable, value in current().assigned if id(variable) in variables]
    if not assigned or len(assigned) != len({id(variable) for variable, _ in assigned}):
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}]: call update_state once in a model_fn, where each call begins at the same "
            "values. Join the tensors, or use several metrics."
        )
    for key in _GLOBAL:
        collection = v1.get_collection_ref(key)
        collection[:] = [variable for variable in collection if id(variable) not in variables]
    for key in LOCAL:
        v1.get_collection_ref(key).extend(variables.values())
    return metric.result(), assign(assigned)


library.convert_metrics(_metric_pair)
