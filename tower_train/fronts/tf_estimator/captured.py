"""Takes gradients from a model_fn's own optimizer calls: they are averaged, and applied once for all towers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tower_train.fronts import compat

v1 = tf.compat.v1
_current = contextvars.ContextVar("captured", default=None)


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of apply_gradients.

    Attributes:
      grads_and_vars: its arguments.
      apply: (grads_and_vars) -> op that applies these instead, and increments the global step if asked to.
      placeholder: the op that the caller got. It does nothing; ops that wait for it must wait for the update.
      looks_itself: whether `apply` handles gradients that are not finite, as an optimizer that scales the loss does.
    """

    grads_and_vars: list
    apply: Callable[[list], tf.Operation]
    placeholder: tf.Operation
    looks_itself: bool = False


@dataclasses.dataclass
class Captured:
    """The changes that one call of a model_fn makes to variables, in their order.

    Attributes:
      tower: the tower's index.
      updates: its calls of apply_gradients.
      assigned: the Keras variables that layers and metrics assign to (moving averages, seeds, sums), with their new
        values. In a graph Keras does not do so itself.
    """

    tower: int = 0
    updates: list[Update] = dataclasses.field(default_factory=list)
    assigned: list[tuple[keras.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def capturing(tower: int) -> Iterator[Captured]:
    """Keeps optimizers of this thread from applying gradients within this block, in which a model_fn is called."""
    captured = Captured(tower)
    token = _current.set(captured)
    apply_gradients = v1.train.Optimizer.apply_gradients

    def capture(optimizer, grads_and_vars, global_step=None, name=None):
        def original(averaged):
            return apply_gradients(optimizer, averaged, global_step, name)

        return original(grads_and_vars) if _current.get() is None else record(grads_and_vars, original)

    try:
        with (
            compat.replaced(v1.train.Optimizer, "apply_gradients", capture),
            compat.intercepted_assignments(_capture_assign),
        ):
            yield captured
    finally:
        _current.reset(token)


def _capture_assign(assign, variable, value) -> None:
    if _current.get() is None:  # another thread's
        assign(variable, value)
    else:
        _current.get().assigned.append((variable, tf.cast(value, variable.value.dtype)))


def assign(pairs) -> tf.Operation:
    """Returns the op that assigns values to variables; none if there is no input for one of the values.

    Args:
      pairs: (variable of the graph, new value).
    """
    pairs = list(pairs)
    with tf.control_dependencies([value for _, value in pairs]):
        return tf.group([variable.assign(value, read_value=False) for variable, value in pairs])


def current() -> Captured | None:
    """Returns the record of the model_fn that is being called; None elsewhere."""
    return _current.get()


def tower() -> int:
    """Returns the index of the tower that a model_fn is called for; 0 elsewhere, such as for an export."""
    return _current.get().tower if _current.get() else 0


def record(grads_and_vars, apply: Callable[[list], tf.Operation], looks_itself: bool = False) -> tf.Operation:
    """Takes one call's gradients, within `capturing`, and returns its placeholder. Arguments as in `Update`."""
    placeholder = tf.no_op("train")  # has the control inputs of the caller, such as its UPDATE_OPS
    _current.get().updates.append(Update(list(grads_and_vars), apply, placeholder, looks_itself))
    return placeholder
