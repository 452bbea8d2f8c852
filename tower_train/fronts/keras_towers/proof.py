"""Shows on a few examples that the towers of a Keras model train what one device trains."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tower_train import console
from tower_train.fronts import compat, parts
from tower_train.fronts.keras_towers.calls import explained
from tower_train.fronts.keras_towers.layers import Seen, compare_layers
from tower_train.fronts.keras_towers.step import updates_noted
from tower_train.graph.random_state import source_line
from tower_train.proof import first
from tower_train.proof.comparison import Training, Values, compare, is_scaled
from tower_train.proof.first import EACH, STEPS
from tower_train.proof.rounding import epsilon, least_exact, rounded

_HOW_NOT = "multi_gpu_model(check_towers='never')"


class FirstStep:
    """A model's training function until its first step, before which it compares towers with one device: on the
    batches of that step, which it then does."""

    def __init__(self, model: keras.Model, train: Callable, compare: Callable[[Sequence], str]):
        """train: the training function. compare: batches -> a line for people."""
        self._model, self._train, self._compare = model, train, compare

    def __call__(self, iterator):
        if not isinstance(iterator, tf.data.Iterator):  # of train_on_batch
            return self._train(iterator)
        batches = list(itertools.islice(iterator, self._model.steps_per_execution))
        if batches:
            with compat.random_states_kept():
                console.say(first.before_training(lambda: self._compare(batches), _HOW_NOT))
        self._model.train_function = self._train
        return self._train(iter(compat.as_dataset(batches, iterator.element_spec)) if batches else iterator)


@explained()
@compat.without_tracing_remarks()
def compare_steps(
    towers: Callable[[int, str], keras.Model], alone: keras.Model, batches: Sequence, count: int, batch_norm: str,
    rehearse: Callable[[Any], list[keras.optimizers.Optimizer]], is_first: bool = False,
) -> str:  # fmt: skip
    """Compares a few steps of a model's towers with those of one device, and leaves the model as it was.

    They are computed in float64 if all of the model can be, else in its own dtype.

    Args:
      towers: (number, how they normalise) -> the model with so many towers.
      alone: the compiled model, with the same variables.
      batches: as steps take them; the examples are their first ones.
      count, batch_norm: of the training's towers.
      rehearse: batch -> the optimizers of a step on it, which it makes ready.
      is_first: whether nobody asked: then it may be of fewer towers and examples.

    Returns:
      A line for people.

    Raises:
      ConfigError: there are too few examples, or the model cannot be compared.
      GraphError: a variable differs by more than rounding.
    """
    count, each, began = min(count, first.MOST_TOWERS) if is_first else count, EACH, time.monotonic()
    optimizers, adds_losses = rehearse(batches[0]), compat.adds_losses(alone)
    if is_first and first.announce(2, 5 * (time.monotonic() - began), _HOW_NOT):  # of tracing, most of all
        count, each = 2, EACH // 2
    optimizer_variables = [variable for each in optimizers for variable in each.variables]
    variables = {id(v): v for v in [*alone.variables, *optimizer_variables, *alone.metrics_variables]}.values()
    inner = [getattr(each, "inner_optimizer", each) for each in optimizers]
    # An optimizer that accumulates gradients updates once in so many steps.
    steps = max(STEPS, *(each.gradient_accumulation_steps or 1 for each in inner), 1)
    rows, variables = _rows(batches, count, each), list(variables)
    comparison = _Comparison(towers, alone, rows, steps, variables, count, batch_norm, adds_losses)
    return first.in_float64(comparison.line, compat.in_float64(variables), alone.compute_dtype)


def _refuse_less_exact(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Raises TypeError if one of the gradients is computed from variables in another dtype than float64."""

    def reads(op: tf.Operation) -> bool:
        return any(tensor.dtype == tf.resource for tensor in op.inputs) and any(t.dtype.is_floating for t in op.outputs)

    for grad in (getattr(grad, "values", grad) for grad in grads if grad is not None):  # an embedding's are sparse
        least = least_exact([grad], [op for op in grad.graph.get_operations() if reads(op)])
        if least.dtype != tf.float64:
            raise TypeError(f"{least.op.type} ({source_line(least.op)}) computes in {least.dtype.name}")


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The steps of a model's towers and of one device, which begin with the variables' present values."""

    towers: Callable[[int, str], keras.Model]
    alone: keras.Model
    rows: Sequence  # the batches
    steps: int
    variables: Sequence[keras.Variable]  # of the model, its optimizers and metrics
    count: int
    batch_norm: str
    adds_losses: bool

    def line(self, dtype: str) -> str:
        """Does the steps in a dtype, compares, and puts the variables back; returns a line for people."""
        before = [v.numpy() for v in self.variables]
        rounding = epsilon(np.dtype(tf.as_dtype(dtype).as_numpy_dtype))
        one, several, by_tower = self.alone, self.towers(self.count, "global"), None

        def reset() -> None:
            for variable, value in zip(self.variables, before, strict=True):
                variable.assign(value)

        def first_layer() -> tuple[Seen | None, set]:
            around = functools.partial(several.train_around, self.rows[0])
            return compare_layers(lambda: one.train_step(self.rows[0]), around, rounding**0.6, reset)

        trained = {id(variable) for variable in one.trainable_variables}
        metrics = {id(variable) for variable in one.metrics_variables}
        names = {i: v.path for i, v in enumerate(self.variables) if id(v) not in metrics}
        weights = {i: name for i, name in names.items() if id(self.variables[i]) in trained}

        def training(model: keras.Model) -> Training:
            def train(seed: int | None) -> list[Values]:
                reset()
                for i in weights if seed is not None else ():
                    self.variables[i].assign(rounded(before[i], rounding, seed))
                after = []
                for _, batch in zip(range(self.steps), itertools.cycle(self.rows), strict=False):
                    with updates_noted() as updates:  # when the step is traced
                        compat.train_on(model, batch)
                    if model is one and dtype == "float64":
                        _refuse_less_exact([grad for _, pairs in updates for grad, _ in pairs])
                    seen = {i: self.variables[i].numpy() for i in names}
                    is_moved = not all(is_scaled(before[i], seen[i]) for i in weights)
                    after.append(Values({name: seen[i] for i, name in names.items()}, is_moved=is_moved))
                return after

            return train

        with _traced_anew(one):
            try:
                if self.adds_losses:
                    several.summed.keys.update(first_layer()[1])  # of all that `towers` makes
                if self.batch_norm == "tower":
                    by_tower = training(self.towers(self.count, "tower"))
                verdict = compare(training(one), training(several), list(weights.values()), rounding, by_tower)
                begins = None
                if verdict.excess:
                    with contextlib.suppress(Exception):  # of a step that cannot be looked into: the variable is known
                        begins, _ = first_layer()
                size = f"{self.steps} steps of {parts.batch_size(self.rows[0])} examples, {dtype}"
                return first.line_of_model(verdict, self.count, size, begins)
            finally:
                reset()


def first_batches(data: Sequence, count: int) -> list:
    """Returns the first batches of what `fit` takes, (x, y, sample_weight), with examples for so many towers."""
    needed, batches = STEPS * EACH * count, []
    for batch in compat.batches(*data, needed):
        batches.append(batch)
        needed -= int(parts.batch_size(batch))
        if needed <= 0:
            break
    return batches


def _rows(batches: Sequence, count: int, each: int) -> list:
    """Returns the batches of the steps, each of other examples, and of so many a tower if there are."""
    examples = sum(int(parts.batch_size(batch)) for batch in batches)
    size = count * min(each, first.examples_of_tower(examples, count))

    def cut(step: int, *leaves):
        if leaves[0] is None or leaves[0].shape.rank == 0:
            return leaves[0]
        whole = leaves[0] if len(leaves) == 1 else parts.joined(leaves)
        times = int(parts.batch_size(whole)) // examples  # rows of an example
        return parts.cut_rows(whole, step * size * times, size * times)

    return [keras.tree.map_structure(functools.partial(cut, step), *batches) for step in range(STEPS)]


@contextlib.contextmanager
def _traced_anew(model: keras.Model) -> Iterator[None]:
    """Lets a model trace its training function anew within this block, and have that of before after it."""
    before, model.train_function = model.train_function, None
    try:
        yield
    finally:
        model.train_function = before
