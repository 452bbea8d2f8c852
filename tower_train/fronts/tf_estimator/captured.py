"""Takes gradients from a model_fn's own optimizer calls: they are averaged, and applied once for all towers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.graph.collectives import AllReduce

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
      tower: the tower's index in this worker.
      num_towers: of all workers.
      updates: its calls of apply_gradients.
      assigned: the variables that Keras layers and metrics assign to (moving averages, seeds, sums), each with its new
        value. In a graph Keras does not do so itself.
    """

    tower: int = 0
    num_towers: int = 1
    updates: list[Update] = dataclasses.field(default_factory=list)
    assigned: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)

    def multiply_gradients(self) -> None:
        """Multiplies gradients with num_towers, so that their mean over towers is a sum."""
        self.updates = [
            dataclasses.replace(update, grads_and_vars=[(_times(g, self.num_towers), v) for g, v in grads_and_vars])
            for update in self.updates
            for grads_and_vars in [update.grads_and_vars]
        ]


def _times(grad: tf.Tensor | tf.IndexedSlices | None, factor: int) -> tf.Tensor | tf.IndexedSlices | None:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return None if grad is None else grad * factor


@contextlib.contextmanager
def capturing(tower: int, num_towers: int) -> Iterator[Captured]:
    """Keeps optimizers of this thread from applying gradients within this block, in which a model_fn is called."""
    captured = Captured(tower, num_towers)
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
        _current.get().assigned.append((variable.value, tf.cast(value, variable.value.dtype)))


def note(pairs) -> list[tf.Operation]:
    """Leaves assignments, pairs (variable of the graph, new value), to the step of all towers.

    Returns:
      The ops that an update has to wait for; elsewhere than in a tower the op that assigns.
    """
    if _current.get() is None:
        return [assign(pairs)]
    _current.get().assigned.extend(pairs)
    return []


def assign_merged(captures: Sequence[Captured], all_reduce: AllReduce) -> tf.Operation:
    """Returns the op that assigns what the layers of all towers do: the mean over the towers of all workers to
    floating-point variables such as moving averages, the first tower's value to others such as seeds.

    Args:
      captures: over this worker's towers.
      all_reduce: averages between workers.

    Raises:
      GraphError: the towers assign to different variables.
    """
    variables = [variable for variable, _ in captures[0].assigned]
    names = [[variable.name for variable, _ in captured.assigned] for captured in captures]
    if differing := next((each for each in names if each != names[0]), None):
        raise errors.GraphError(
            f"The layers of one tower assign to {', '.join(names[0])}, those of another to {', '.join(differing)}. "
            "model_fn must do the same each time it is called."
        )
    values = [[value for _, value in each] for each in zip(*(captured.assigned for captured in captures), strict=True)]
    averaged = [i for i, variable in enumerate(variables) if variable.dtype.is_floating]
    means = [tf.ensure_shape(tf.add_n(values[i]) / len(captures), variables[i].shape) for i in averaged]
    [means] = all_reduce.mean([means], exactly=True)
    merged = {i: of_towers[0] for i, of_towers in enumerate(values)} | dict(zip(averaged, means, strict=True))
    return assign(zip(variables, merged.values(), strict=True))


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
