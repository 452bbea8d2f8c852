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

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.keras_building import floatx
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.layers import Seen, compare_layers
from tower_train.fronts.lockstep.step import Rehearsal, Updates, explained
from tower_train.graph.random_state import line_of
from tower_train.proof import comparison
from tower_train.proof.comparison import EACH, STEPS, Values
from tower_train.proof.rounding import epsilon, least_exact, rounded

_MOST_TOWERS, _LONG_SECS = 4, 10  # of the comparison before a first fit: more towers would show nothing else


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
                console.say(self._line(batches))
        self._model.train_function = self._train
        return self._train(iter(compat.dataset_of(batches, iterator.element_spec)) if batches else iterator)

    def _line(self, batches: Sequence) -> str:
        try:
            return self._compare(batches)
        except errors.GraphError as error:
            raise errors.GraphError(
                f"{error} Change that, or train all the same with multi_gpu_model(check_towers='never')."
            ) from None
        except errors.UserError:
            raise
        except Exception as error:  # whatever a layer raises of few examples; the training raises what it does of all
            return f"*** towers: not compared with one device, as that fails: {errors.reason(error)}"


@explained()
@compat.without_tracing_remarks()
def compare_steps(
    towers: Callable[[int, str], keras.Model], alone: keras.Model, batches: Sequence, count: int, batch_norm: str,
    rehearse: Callable[[Any], Rehearsal], is_first: bool = False,
) -> str:  # fmt: skip
    """Compares a few steps of a model's towers with those of one device, and leaves the model as it was.

    They are computed in float64 if all of the model can be, else in its own dtype.

    Args:
      towers: (number, how they normalise) -> the model with so many towers.
      alone: the compiled model, with the same variables.
      batches: as steps take them; the examples are their first ones.
      count, batch_norm: of the training's towers.
      rehearse: batch -> the rehearsal of a step on it.
      is_first: whether nobody asked: then it may be of fewer towers and examples.

    Returns:
      A line for people.

    Raises:
      ConfigError: there are too few examples, or the model cannot be compared.
      GraphError: a variable differs by more than rounding.
    """
    count, each, began = min(count, _MOST_TOWERS) if is_first else count, EACH, time.monotonic()
    rehearsed, adds_losses = rehearse(batches[0]), compat.adds_losses(alone)
    secs = (time.monotonic() - began) * (count + 3)  # of tracing, most of all
    if is_first and secs > _LONG_SECS:
        console.say(
            f"towers:   comparing 2 with one device, for about {5 * secs / (count + 3):.0f} s "
            "(multi_gpu_model(check_towers='never') leaves it out)"
        )
        count, each = 2, EACH // 2
    rows = _rows(batches, count, each)
    of_optimizers = [variable for each in rehearsed.optimizers for variable in each.variables]
    variables = list({id(v): v for v in [*alone.variables, *of_optimizers, *alone.metrics_variables]}.values())
    inner = [getattr(each, "inner_optimizer", each) for each in rehearsed.optimizers]
    # An optimizer that accumulates gradients updates once in so many steps.
    steps = max(STEPS, *(each.gradient_accumulation_steps or 1 for each in inner), 1)

    compared = _Comparison(towers, alone, rows, steps, variables, count, batch_norm, adds_losses).line
    with _traced_anew(alone):
        try:
            with compat.in_float64(variables), floatx("float64"):
                return compared("float64")
        except errors.UserError:
            raise
        except Exception as error:  # whatever a layer raises, or TensorFlow without a kernel
            reason = errors.reason(error)
        with _traced_anew(alone):
            return f"{compared(alone.compute_dtype)}. In float64: {reason}"


def _refuse_less_exact(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Raises TypeError if one of the gradients is computed from variables in another dtype than float64."""

    def reads(op: tf.Operation) -> bool:
        return any(tensor.dtype == tf.resource for tensor in op.inputs) and any(t.dtype.is_floating for t in op.outputs)

    for grad in (getattr(grad, "values", grad) for grad in grads if grad is not None):  # an embedding's are sparse
        least = least_exact([grad], [op for op in grad.graph.get_operations() if reads(op)])
        if least.dtype != tf.float64:
            raise TypeError(f"{least.op.type} ({line_of(least.op)}) computes in {least.dtype.name}")


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
        size = f"{self.steps} steps of {parts.batch_size(self.rows[0])} examples, {dtype}"

        def reset() -> None:
            for variable, value in zip(self.variables, before, strict=True):
                variable.assign(value)

        def layers_of() -> tuple[Seen | None, set]:
            several = functools.partial(self.towers(self.count, "global").train_around, self.rows[0])
            return compare_layers(lambda: self.alone.train_step(self.rows[0]), several, rounding**0.6, reset)

        try:
            if self.adds_losses:
                self.towers(1, "global").summed.keys.update(layers_of()[1])  # of all that `towers` makes
            verdict, by_tower = self._verdict(self.batch_norm, dtype, before, rounding), None
            if self.batch_norm == "tower" and verdict.excess:  # by design, if there is batch normalisation
                by_tower, verdict = verdict.excess[0], self._verdict("global", dtype, before, rounding)
            begins = None
            if verdict.excess:
                with contextlib.suppress(Exception):  # of a step that cannot be looked into: the variable is known
                    begins, _ = layers_of()
            return comparison.line_of_model(verdict, self.count, size, by_tower, begins)
        finally:
            reset()

    def _verdict(self, how: str, dtype: str, before: Sequence[np.ndarray], rounding: float) -> comparison.Verdict:
        """Compares towers that normalise so with one device, from values and roundings of these."""
        weights = {id(variable) for variable in self.alone.trainable_variables}
        metrics = {id(variable) for variable in self.alone.metrics_variables}
        names = {i: v.path for i, v in enumerate(self.variables) if id(v) not in metrics}
        trained = [i for i in names if id(self.variables[i]) in weights]

        def training(model: keras.Model) -> comparison.Training:
            def train(seed: int | None) -> list[Values]:
                for i, value in enumerate(before):
                    is_rounded = seed is not None and i in trained
                    self.variables[i].assign(rounded(value, rounding, seed) if is_rounded else value)
                after = []
                for _, batch in zip(range(self.steps), itertools.cycle(self.rows), strict=False):
                    with Updates() as updates:  # when the step is traced
                        compat.train_on(model, batch)
                    if model is self.alone and dtype == "float64":
                        _refuse_less_exact([grad for _, pairs in updates for grad, _ in pairs])
                    seen = {i: self.variables[i].numpy() for i in names}
                    is_moved = not all(comparison.is_scaled(before[i], seen[i]) for i in trained)
                    after.append(Values({name: seen[i] for i, name in names.items()}, is_moved=is_moved))
                return after

            return train

        several = self.towers(self.count, how)
        return comparison.compare(training(self.alone), training(several), [names[i] for i in trained], rounding)


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
    batches = [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]
    examples = sum(int(parts.batch_size(batch)) for batch in batches)
    if examples < STEPS * count:
        raise errors.ConfigError(
            f"check: there are fewer than {STEPS * count} examples, one for each of {count} towers in {STEPS} steps."
        )
    size = count * min(each, examples // (STEPS * count))

    def cut(step: int):
        def of(*leaves):
            if leaves[0].shape.rank == 0:
                return leaves[0]
            whole = leaves[0] if len(leaves) == 1 else _concatenated(leaves)
            times = int(parts.batch_size(whole)) // examples  # rows of an example
            return parts.rows_of(whole, step * size * times, size * times)

        pairs = zip(*batches, strict=True)
        return keras.utils.pack_x_y_sample_weight(  # as fit does, which gives a step x alone as it is
            *(None if part[0] is None else keras.tree.map_structure(of, *part) for part in pairs)
        )

    return [cut(step) for step in range(STEPS)]


def _concatenated(leaves: Sequence):
    return tf.sparse.concat(0, list(leaves)) if isinstance(leaves[0], tf.SparseTensor) else tf.concat(leaves, 0)


@contextlib.contextmanager
def _traced_anew(*models: keras.Model) -> Iterator[None]:
    """Lets models trace their training functions anew within this block, and have those of before after it."""
    before = [model.train_function for model in models]
    for model in models:
        model.train_function = None
    try:
        yield
    finally:
        for model, function in zip(models, before, strict=True):
            model.train_function = function
