"""Takes gradients out of a model_fn's own optimizer calls: they are averaged, and applied once for all towers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import keras
import tensorflow as tf

v1 = tf.compat.v1
_current = contextvars.ContextVar("captured", default=None)


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of apply_gradients.

    Attributes:
      grads_and_vars: what was to be applied.
      apply: (grads_and_vars) -> op that applies others in their place, and increments the global step if asked to.
      placeholder: the op that the caller got: it does nothing itself; what waits for it must wait for the update.
    """

    grads_and_vars: list
    apply: Callable[[list], tf.Operation]
    placeholder: tf.Operation


@dataclasses.dataclass
class Captured:
    """What a model_fn did to variables, in the order in which it did it.

    Attributes:
      tower: for which tower it was called.
      updates: its calls of apply_gradients.
      assigned: ops by which Keras layers assign to their variables (moving averages, seeds). Keras does not run them in
        a graph.
    """

    tower: int = 0
    updates: list[Update] = dataclasses.field(default_factory=list)
    assigned: list[tf.Operation] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def capturing(tower: int) -> Iterator[Captured]:
    """Within this block, in which a model_fn is called, no optimizer of this thread applies gradients."""
    captured = Captured(tower)
    token = _current.set(captured)
    apply_gradients = v1.train.Optimizer.apply_gradients
    assign = keras.Variable._direct_assign

    def capture(optimizer, grads_and_vars, global_step=None, name=None):
        def original(averaged):
            return apply_gradients(optimizer, averaged, global_step, name)

        return original(grads_and_vars) if _current.get() is None else record(grads_and_vars, original)

    def capture_assign(variable, value):
        if _current.get() is None:
            assign(variable, value)
        else:
            value = tf.cast(value, variable.value.dtype)
            _current.get().assigned.append(variable.value.assign(value, read_value=False))

    try:
        with (
            mock.patch.object(v1.train.Optimizer, "apply_gradients", capture),
            mock.patch.object(keras.Variable, "_direct_assign", capture_assign),
        ):
            yield captured
    finally:
        _current.reset(token)


def tower() -> int:
    """Which tower a model_fn is being called for; 0 elsewhere, such as for an export."""
    return _current.get().tower if _current.get() else 0


def record(grads_and_vars, apply: Callable[[list], tf.Operation]) -> tf.Operation:
    """Takes one call's gradients, within `capturing`, and returns its placeholder."""
    placeholder = tf.no_op("train")  # has the control inputs of the caller, such as its UPDATE_OPS
    _current.get().updates.append(Update(list(grads_and_vars), apply, placeholder))
    return placeholder
