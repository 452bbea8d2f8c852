"""One tower's run of a model's `tower_step`: from yield to yield, on the tower's device, with its part of the batch."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps.parts import Part


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """The end of a tower's step.

    Attributes:
      logs: its result.
    """

    logs: Any


@dataclasses.dataclass(frozen=True, eq=False)
class MetricUpdate:
    """A call of a metric's update_state in a tower."""

    metric: keras.metrics.Metric
    args: tuple
    kwargs: dict


class Tower:
    """A tower of a step.

    A phase lies between two updates. Within it the tower computes on copies of the weights, with respect to which its
    losses are differentiated.

    Attributes:
      part: of the batch.
      device: string.
      updates: over calls of update_state in this phase.
      results: over metrics' results, (the scalar, the metric, its name in a result of several, or None).
      joins: over the Joins of this phase, (the tower's own floating-point tensors, its copies of the joined ones).
      assigned: {id: (variable, value)} of this phase.
    """

    def __init__(self, model: keras.Model, part: Part, device: str):
        """Begins the step, and its first phase.

        Args:
          model: with all its variables, and the method `tower_step`.
          part: of the batch.
          device: for the tower.
        """
        self.part, self.device = part, device
        self._model = model
        self._steps: Generator = model.tower_step(part.data)
        self.results: list[tuple[tf.Tensor, keras.metrics.Metric, str | None]] = []
        self._metrics = list({id(m): m for m in [*model.metrics, *compat.layer_metrics(model)]}.values())
        self.begin_phase()

    def begin_phase(self) -> None:
        """Reads the weights again."""
        self.updates: list[MetricUpdate] = []
        self.joins: list[tuple[list[tf.Tensor], list[tf.Tensor]]] = []
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        weights = self._model.trainable_weights
        with tf.device(self.device), self._tape:
            copies = [(weight, self._watched(weight.value)) for weight in weights]
        self._sources = {id(weight): [copy] for weight, copy in copies}
        self._scope = _Scope(copies, self._assign)

    def advance(self, answer: Any) -> Any:
        """Runs the step to its next yield, whose value it returns, or to its end, for which it returns Finished.

        Args:
          answer: the result of the last yield.
        """
        with contextlib.ExitStack() as stack:
            for context in (tf.device(self.device), tf.name_scope(f"tower_{self.part.index}/"), self._scope):
                stack.enter_context(context)
            for metric in self._metrics:
                stack.enter_context(compat.replaced(metric, "result", self._reader(metric)))
                stack.enter_context(compat.replaced(metric, "update_state", self._recorder(metric)))
            if self.part.count > 1:
                stack.enter_context(compat.drawn_for_more(self.part.rows_of_draw, self._refuse_draw))
            stack.enter_context(self._tape)
            try:
                return self._steps.send(answer)
            except StopIteration as end:
                return Finished(end.value)

    def joined(self, own: list[tf.Tensor], whole: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns this tower's copies of joined tensors, with respect to which its losses can be differentiated."""
        with tf.device(self.device), self._tape:
            copies = [self._watched(tensor) if tensor.dtype.is_floating else tensor for tensor in whole]
        floating = [i for i, tensor in enumerate(whole) if tensor.dtype.is_floating]
        self.joins.append(([own[i] for i in floating], [copies[i] for i in floating]))
        return copies

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
        sources = [self._sources[id(variable)] for variable in variables]
        grads = iter(self.gradients(targets, of_targets, [source for each in sources for source in each]))
        found = [[next(grads) for _ in each] for each in sources]
        with tf.device(self.device):
            return [_sum([grad for grad in each if grad is not None]) for each in found]

    def _watched(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a copy that depends on nothing."""
        with self._tape.stop_recording():
            copy = tf.identity(tensor)
        self._tape.watch(copy)
        return copy

    def _assign(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Notes an assignment, and returns the variable's new value."""
        self.assigned[id(variable)] = (variable, value)
        if id(variable) not in self._sources:
            return value
        self._sources[id(variable)].append(self._watched(value))
        return self._sources[id(variable)][-1]

    def _recorder(self, metric: keras.metrics.Metric) -> Callable:
        return lambda *args, **kwargs: self.updates.append(MetricUpdate(metric, args, kwargs))

    def _reader(self, metric: keras.metrics.Metric) -> Callable:
        read = metric.result

        def result():
            found = keras.tree.map_structure(tf.identity, read())
            for name, value in found.items() if isinstance(found, dict) else [(None, found)]:
                self.results.append((value, metric, name))
            return found

        return result

    def _refuse_draw(self, name: str) -> None:
        raise errors.ConfigError(
            f"{type(self._model).__name__}.tower_step calls keras.random.{name}, which towers cannot draw as one "
            "device does. Draw with keras.random.normal, uniform, truncated_normal, randint or dropout, make the "
            "numbers a part of the data, or use gpus=1."
        )


class _Scope(keras.StatelessScope):
    """A scope in which layers and programs do not change variables."""

    def __init__(self, copies, assign: Callable[[keras.Variable, tf.Tensor], tf.Tensor]):
        super().__init__(copies, collect_losses=True)
        self._assign = assign

    def add_update(self, update):
        variable, value = update
        super().add_update((variable, self._assign(variable, value)))


def _sum(grads: list):
    """Adds gradients; None if there are none. A single one may be sparse."""
    if len(grads) < 2:
        return grads[0] if grads else None
    return tf.add_n([tf.convert_to_tensor(grad) for grad in grads])
