"""One tower's run of a step: from yield to yield, on the tower's device, with its part of the batch."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.lockstep.parts import Part
from tower_train.fronts.lockstep.requests import Finished
from tower_train.fronts.lockstep.tower_call import TowerScope, drawn_by_example

Step = Callable[[keras.Model, Any], Generator]  # (model, the tower's part of a batch) -> the step's requests


class Tower:
    """A tower of a step.

    A phase lies between two updates. Within it the tower computes on copies of the weights, with respect to which its
    losses are differentiated.

    Attributes:
      part: of the batch.
      device: string.
      updates: over calls of metrics' update_state in this phase, (metric, args, kwargs).
      results: over metrics' results, (the scalar, the metric, its name in a result of several, or None).
      joins: over the Joins of this phase, (the tower's tensors, its copies of the joined ones), floating point.
    """

    def __init__(self, model: keras.Model, step: Step, part: Part, device: str):
        """Begins the step, and its first phase.

        Args:
          model: with all its variables.
          step: of the model.
          part: of the batch.
          device: for the tower.
        """
        self.part, self.device = part, device
        self._model, self._steps = model, step(model, part.data)
        self._weights = {id(weight): weight for weight in model.trainable_weights}
        self._metrics = {id(m): m for m in [*model.metrics, *compat.layer_metrics(model)]}.values()
        self._added_losses: dict[int, set] = {}
        self.results: list[tuple[tf.Tensor, keras.metrics.Metric, str | None]] = []
        self.begin_phase()

    @property
    def assigned(self) -> dict[int, tuple[keras.Variable, tf.Tensor]]:
        """{id: (variable, value)} of this phase."""
        return self._scope.assigned

    def begin_phase(self) -> None:
        """Reads the weights again."""
        self.updates: list[tuple[keras.metrics.Metric, tuple, dict]] = []
        self.joins: list[tuple[list[tf.Tensor], list[tf.Tensor]]] = []
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._sources: list[tuple[int, tf.Tensor]] = []  # (id of a weight, a copy of it), one more if it is assigned
        with tf.device(self.device), self._tape:
            copies = [(weight, self._value(weight, weight.value)) for weight in self._weights.values()]
        self._scope = TowerScope(copies, self._value)

    def advance(self, answer: Any) -> Any:
        """Runs the step to its next yield, whose value it returns, or to its end, for which it returns Finished.

        Args:
          answer: the result of the last yield.
        """
        drawn = drawn_by_example(self.part.cuts if self.part.count > 1 else (), type(self._model).__name__)
        losses, name = compat.added_losses(self._model, self._added_losses), f"tower_{self.part.index}/"
        with contextlib.ExitStack() as stack:
            for context in (tf.device(self.device), tf.name_scope(name), self._scope, drawn, losses):
                stack.enter_context(context)
            for metric in self._metrics:
                stack.enter_context(compat.replaced(metric, "result", self._reader(metric)))
                stack.enter_context(compat.replaced(metric, "update_state", self._recorder(metric)))
            stack.enter_context(self._tape)
            try:
                return self._steps.send(answer)
            except StopIteration as end:
                return Finished(end.value)

    def joined(self, local: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
        """Returns this tower's copy of a joined tensor, with respect to which its losses can be differentiated.

        Args:
          local: the tower's rows.
          whole: those of all towers.
        """
        if not isinstance(whole, tf.Tensor) or not whole.dtype.is_floating:
            return whole
        with tf.device(self.device), self._tape:
            copy = self._watched(whole)
        self.joins[-1][0].append(local)
        self.joins[-1][1].append(copy)
        return copy

    def gradients(self, targets: Sequence[tf.Tensor], of_targets: Sequence, sources: Sequence[tf.Tensor]) -> list:
        """Computes gradients of this phase; None for a source without one.

        Args:
          targets: tensors of this phase.
          of_targets: the gradients by each of them.
          sources: weights' copies, or copies of joined tensors.
        """
        with tf.device(self.device):
            return self._tape.gradient(list(targets), list(sources), list(of_targets))

    def weight_gradients(self, targets: Sequence[tf.Tensor], of_targets: Sequence, variables: Sequence) -> list:
        """Computes gradients by weights, as `gradients`."""
        of_weight = {id(variable): [] for variable in variables}
        sources = [(key, copy) for key, copy in self._sources if key in of_weight]
        grads = self.gradients(targets, of_targets, [copy for _, copy in sources])
        for (key, _), grad in zip(sources, grads, strict=True):
            of_weight[key].append(grad)
        with tf.device(self.device):
            return [added(of_copies) for of_copies in of_weight.values()]

    def _watched(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a copy that depends on nothing."""
        with self._tape.stop_recording():
            copy = tf.identity(tensor)
        self._tape.watch(copy)
        return copy

    def _value(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Returns the value that a variable has in this phase once it is assigned this one."""
        if id(variable) not in self._weights:
            return value
        self._sources.append((id(variable), self._watched(value)))
        return self._sources[-1][1]

    def _recorder(self, metric: keras.metrics.Metric) -> Callable:
        return lambda *args, **kwargs: self.updates.append((metric, args, kwargs))

    def _reader(self, metric: keras.metrics.Metric) -> Callable:
        read = metric.result

        def result():
            values = keras.tree.map_structure(tf.identity, read())
            for name, value in values.items() if isinstance(values, dict) else [(None, values)]:
                self.results.append((value, metric, name))
            return values

        return result


def added(grads: Sequence):
    """Adds gradients, those of float16 as if without rounding in between; None if there are none. One alone may be
    sparse."""
    present = [grad for grad in grads if grad is not None]
    if len(present) < 2:
        return present[0] if present else None
    if present[0].dtype != tf.float16:
        return tf.add_n(present)
    return tf.cast(tf.add_n([tf.cast(grad, tf.float32) for grad in present]), tf.float16)
