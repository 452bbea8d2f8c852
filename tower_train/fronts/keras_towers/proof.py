"""Shows on a few examples that the towers of a Keras model train what one device trains."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train import console
from tower_train.fronts import compat, parts
from tower_train.fronts.keras_towers.calls import explained
from tower_train.fronts.keras_towers.layers import differing_layer
from tower_train.fronts.keras_towers.step import updates_noted
from tower_train.graph.gradients import variable_name
from tower_train.graph.random_state import source_line
from tower_train.proof import comparison, operations
from tower_train.proof.comparison import STEPS, Arrays, Outcome, Training, Values

_HOW_NOT = "multi_gpu_model(check_towers='never')"
_REPORTED_TO = 0.01  # numbers of a report that differ relatively by no more are equal


def first_step(parallel, train: Callable) -> Callable:
    """Returns a TowerModel's training function for its first step, before which it compares that step's batches."""

    def step(iterator):
        spec = getattr(iterator, "element_spec", None)  # none of train_on_batch, which gives a generator
        batches = list(itertools.islice(iterator, parallel.steps_per_execution))
        if batches:
            tensors = keras.tree.map_structure(parts.as_tensor, batches)
            with compat.random_states_kept():
                compare = functools.partial(compare_steps, parallel, tensors, spec, is_first=True)
                console.say(comparison.before_training(compare, _HOW_NOT).line)
            iterator = iter(batches if spec is None else compat.as_dataset(batches, spec))
        parallel.train_function = train
        return train(iterator)

    return step


@explained()
@compat.tracing_not_counted()
def compare_steps(parallel, batches: Sequence, spec, is_first: bool = False) -> Outcome:
    """Compares a few steps of a TowerModel with those of its template on one device, and leaves it as it was.

    They are computed in float64 if all of the model can be, else in its own dtype.

    Args:
      parallel: compiled. Of several workers each compares by itself as many towers as all have.
      batches: as steps take them; the examples are their first ones.
      spec: the element_spec of their data set: whether its shapes tell a batch's size, or a program may go other ways.
      is_first: whether nobody asked: then it may be of fewer towers and examples.

    Raises ConfigError if there are too few examples, or the model cannot be compared.
    """
    alone, each, began = parallel.template, comparison.EACH, time.monotonic()
    count = min(parallel.num_towers, comparison.MOST_TOWERS) if is_first else parallel.num_towers
    optimizers, assigned = parallel.rehearse(batches[0], begins=is_first)
    variables = [*alone.variables, *(v for each in optimizers for v in each.variables), *alone.metrics_variables]
    variables = list({id(variable): variable for variable in [*variables, *assigned]}.values())
    numbers, secs = sum(math.prod(variable.shape) for variable in variables), 5 * (time.monotonic() - began)  # to trace
    if is_first and comparison.announce(2, secs + comparison.SECS_OF_NUMBER * numbers, _HOW_NOT):
        count, each = 2, comparison.EACH // 2
    inner = [getattr(each, "inner_optimizer", each) for each in optimizers]
    # An optimizer that accumulates gradients updates once in so many steps.
    steps = max(STEPS, *(each.gradient_accumulation_steps or 1 for each in inner), 1)
    rows = list(itertools.islice(itertools.cycle(_rows(batches, count, each)), steps))

    def compare(dtype: str) -> Outcome:
        comparison.check_memory(numbers, dtype)
        float64 = compat.in_float64(variables) if dtype == "float64" else contextlib.nullcontext()
        with float64, compat.replaced(alone, "train_function", None):  # which is traced anew
            trial = _Trial(variables, alone, rows, spec, is_float64=dtype == "float64")
            several, is_by_tower = parallel.of_towers(count, "global"), parallel.batch_norm_over == "tower"
            by_tower = trial.training(parallel.of_towers(count, "tower")) if is_by_tower else None

            def where(*_) -> str:
                tolerance = comparison.epsilon(np.dtype(dtype)) ** 0.6
                with contextlib.suppress(Exception):  # of a step that cannot be looked into: the variable is known
                    first = differing_layer(alone, several, rows[0], tolerance, trial.reset)
                    return comparison.model_differs(begins=first)
                return comparison.model_differs()

            try:
                what = f"{steps} steps of {parts.batch_size(rows[0])} examples, {dtype}"
                one, all_towers = trial.training(alone), trial.training(several)
                compared = one, all_towers, trial.weights, np.dtype(dtype), count, what, where, by_tower
                outcome = comparison.Comparison(*compared).outcome()
                if outcome.relative is not None and not (outcome.differs or is_by_tower):
                    trial.tell_reports()
                return outcome
            finally:
                trial.reset()

    return comparison.in_dtypes(["float64", alone.compute_dtype], compare)


def _refuse_less_exact(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Raises TypeError if one of the gradients is computed from variables in another dtype than float64."""

    def reads(op: tf.Operation) -> bool:
        return any(tensor.dtype == tf.resource for tensor in op.inputs) and any(t.dtype.is_floating for t in op.outputs)

    for grad in (getattr(grad, "values", grad) for grad in grads if grad is not None):  # an embedding's are sparse
        least = operations.least_exact([grad], [op for op in grad.graph.get_operations() if reads(op)])
        if least.dtype != tf.float64:
            raise TypeError(f"{least.op.type} ({source_line(least.op)}) computes in {least.dtype.name}")


class _Trial:
    """Steps of a model and of its towers, on the same variables, which begin with their present values."""

    def __init__(self, variables: Sequence[keras.Variable], alone: keras.Model, rows: Sequence, spec, is_float64: bool):
        """variables: of the model, its optimizers and metrics. alone: the model. rows: a batch for each step."""
        shapes = [leaf.shape for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec)]
        is_fixed = not any(shape.rank and shape[0] is None for shape in shapes)
        self._spec = tf.data.Dataset.from_tensors(rows[0]).element_spec if is_fixed else spec
        self._before = [(variable, variable.numpy()) for variable in variables]
        self._reports: dict[bool, dict[str, float]] = {}  # of the last step, of one device or of towers
        self._alone, self._rows, self._is_float64 = alone, rows, is_float64
        metrics, trained = set(map(id, alone.metrics_variables)), set(map(id, alone.trainable_variables))
        seen = [variable for variable in variables if id(variable) not in metrics]
        paths = [variable_name(variable) for variable in seen]  # of which several may be the same
        names = [path if paths.count(path) == 1 else f"{path} ({i})" for i, path in enumerate(paths)]
        self._seen = dict(zip(names, seen, strict=True))
        self.weights = [name for name, variable in self._seen.items() if id(variable) in trained]

    def reset(self) -> None:
        for variable, value in self._before:
            variable.assign(value)

    def tell_reports(self) -> None:
        """Says which numbers of a step's report towers do not have as one device has them, such as sums."""
        several, one = (self._reports[is_alone] for is_alone in (False, True))
        both = [(name, each, several[name]) for name, each in one.items() if name in several]
        if names := [name for name, *pair in both if not np.allclose(*pair, _REPORTED_TO, equal_nan=True)]:
            console.notice(
                f"*** towers: the step reports {', '.join(names)} otherwise than on one device: a mean over towers. "
                "Compute a sum over examples from steps.join."
            )

    def training(self, model: keras.Model) -> Training:
        """Returns the steps of the model or its towers."""

        def values() -> Values:
            return Values({}, {}, {name: variable.numpy() for name, variable in self._seen.items()})

        def train(begin: Arrays) -> Iterator[Values]:
            self.reset()
            for name, value in begin.items():
                self._seen[name].assign(value)
            yield values()
            for batch in self._rows:
                with updates_noted() as updates, compat.functions_inlined():  # when the step is traced
                    logs = compat.train_on(model, batch, self._spec)
                self._reports[model is self._alone] = dict(_numbers(logs))
                if model is self._alone and self._is_float64:
                    _refuse_less_exact([grad for _, pairs in updates for grad, _ in pairs])
                yield values()

        return train


def _numbers(logs: dict) -> Iterator[tuple[str, float]]:
    """Yields the names and values of the scalars of a step's report."""
    for path, each in keras.tree.flatten_with_path(logs):
        if tf.is_tensor(each) and each.shape.rank == 0 and each.dtype.is_floating:
            yield "/".join(map(str, path)), float(each)


def first_batches(data: Sequence, count: int) -> tuple[list, object]:
    """Returns the first batches of what `fit` takes, (x, y, sample_weight), with examples for so many towers, and the
    element_spec of their data set."""
    needed, batches, spec = STEPS * comparison.EACH * count, [], None
    for batch, spec in compat.batches(*data, needed):  # noqa: B007 - the same for all
        batches.append(batch)
        needed -= int(parts.batch_size(batch))
        if needed <= 0:
            break
    return batches, spec


def _rows(batches: Sequence, count: int, each: int) -> list:
    """Returns the batches of the steps, each of other examples, and of so many a tower if there are."""
    examples = sum(int(parts.batch_size(batch)) for batch in batches)
    size = count * min(each, comparison.examples_of_tower(examples, count))

    def cut(step: int, *leaves):
        if leaves[0] is None or leaves[0].shape.rank == 0:
            return leaves[0]
        whole = leaves[0] if len(leaves) == 1 else parts.joined(leaves)
        rows = int(parts.batch_size(whole))
        taken = max(rows * size // examples // count, 1) * count  # alike in all towers
        begin = step * taken if step * taken < rows else max(rows - taken, 0)
        return parts.cut_rows(whole, begin, taken)

    return [keras.tree.map_structure(functools.partial(cut, step), *batches) for step in range(STEPS)]
