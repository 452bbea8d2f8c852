"""One tower's run of a step: from yield to yield, on the tower's device, with its part of the batch."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import keras
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.lockstep.draws import drawn_for_more, rows_of_draw
from tower_train.fronts.lockstep.parts import Part
from tower_train.fronts.lockstep.requests import Finished

Step = Callable[[keras.Model, Any], Generator]  # (model, the tower's part of a batch) -> the step's requests


class TowerScope(keras.StatelessScope):
    """A scope in which layers and programs compute on given values of variables, and what they assign is noted.

    Args:
      values: (variable, value), used instead of the variable's own value. Gradients of a weight go to it from what is
        assigned too, as on one device.

    Attributes:
      assigned: {id: (variable, value)}.
    """

    def __init__(self, values: Iterable[tuple]):
        # Variables without a value are a model's that was built for its layers only, and get none here.
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def add_update(self, update):
        variable, value = update
        self.assigned[id(variable)] = update
        before = self.get_current_value(variable)
        is_of_weight = before is not None and variable.trainable
        super().add_update((variable, _assigned(before, value) if is_of_weight else value))


class Tower:
    """A tower of a step.

    A phase lies between two updates. Within it the tower computes on copies of the weights.

    Attributes:
      part, device: of the batch; a string.
      scope: of this phase.
      updates: over calls of metrics' update_state in this phase, (metric, args, kwargs).
    """

    def __init__(self, model: keras.Model, step: Step, part: Part, device: str):
        self.part, self.device = part, device
        self._model, self._steps = model, step(model, part.data)
        self._metrics = {id(m): m for m in [*model.metrics, *compat.layer_metrics(model)]}.values()
        self._added_losses: dict[int, set] = {}
        self._op_seeds = itertools.count()

    def begin_phase(self, weights: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Copies the weights' values."""
        self.updates: list[tuple[keras.metrics.Metric, tuple, dict]] = []
        with tf.device(self.device):
            self.scope = TowerScope([(weight, tf.identity(value)) for weight, value in weights])

    def advance(self, answer: Any) -> Any:
        """Gives the step the result of its last yield; returns the value of the next one, or Finished."""
        rows, program = functools.partial(rows_of_draw, self.part.cuts), type(self._model).__name__
        drawn = drawn_for_more(rows, program if self.part.cuts else "", self._op_seeds)
        compat.take_losses(self._model, self._added_losses)
        with contextlib.ExitStack() as stack:
            for context in (tf.device(self.device), tf.name_scope(f"tower_{self.part.index}/"), self.scope, drawn):
                stack.enter_context(context)
            for metric in self._metrics:
                # Not up to date before the towers meet: what a step returns of it is read then.
                stack.enter_context(compat.replaced(metric, "result", lambda metric=metric: metric))
                record = lambda *args, metric=metric, **kwargs: self.updates.append((metric, args, kwargs))  # noqa: E731
                stack.enter_context(compat.replaced(metric, "update_state", record))
            try:
                return self._steps.send(answer)
            except StopIteration as end:
                return Finished(end.value)


@tf.custom_gradient
def _assigned(before: tf.Tensor, value: tf.Tensor):
    """Returns a value that a weight is assigned; its gradient is that of the weight."""
    return tf.identity(value), lambda grad: (grad, None)
