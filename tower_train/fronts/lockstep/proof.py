"""Shows on a few examples that the towers of a Keras model train what one device trains."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.keras_building import floatx
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.draws import drawn_alike
from tower_train.fronts.lockstep.step import Rehearsal
from tower_train.graph.random_state import line_of
from tower_train.proof.rounding import EACH, STEPS, compare_values, epsilon, least_exact, rounded

_REMARKS = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m.*", re.DOTALL)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Takes from a user's error within this block what Keras puts around it: where it was, and the arguments."""
    try:
        yield
    except errors.UserError as error:
        if wrapped := _REMARKS.fullmatch(str(error)):
            error.args = wrapped.groups()
        raise


@_without_remarks()
def compare_steps(
    towers: keras.Model, alone: keras.Model, data: Sequence, count: int,
    rehearse: Callable[[Any], Rehearsal], is_by_tower: bool = False,
) -> str:  # fmt: skip
    """Compares two steps of a model's towers with two of one device, and leaves the model as it was.

    They are computed in float64 if all of the model can be, else in its own dtype.

    Args:
      towers, alone: compiled models with the same variables, one of which has towers.
      data: x, y, sample_weight, as `fit` takes them.
      count: of the towers.
      rehearse: batch -> the rehearsal of a step on it.
      is_by_tower: whether each tower normalises its own batch.

    Returns:
      A line for people.

    Raises:
      ConfigError: there are too few examples, or the model cannot be compared.
      GraphError: a variable differs by more than rounding.
    """
    norms = [each for each in compat.sublayers(alone) if isinstance(each, keras.layers.BatchNormalization)]
    normalizes = is_by_tower and any(each.trainable for each in norms)
    rows = _rows(data, count, normalizes)
    of_optimizers = [variable for each in rehearse(rows).optimizers for variable in each.variables]
    variables = list({id(v): v for v in [*alone.variables, *of_optimizers, *alone.metrics_variables]}.values())
    program = "check: a model with batch normalisation"
    alike = drawn_alike(count, program) if normalizes else contextlib.nullcontext()  # so that parts that are, stay so
    with alike, _traced_anew(towers, alone):
        try:
            with compat.in_float64(variables), floatx("float64"):
                _refuse_less_exact([grad for _, pairs in rehearse(rows).updates for grad, _ in pairs])
                return _compared(towers, alone, rows, variables, count, normalizes, "float64")
        except errors.UserError:
            raise
        except Exception as error:  # whatever a layer raises, or TensorFlow without a kernel
            reason = errors.reason(error)
        with _traced_anew(towers, alone):
            line = _compared(towers, alone, rows, variables, count, normalizes, alone.compute_dtype)
            return f"{line}. In float64: {reason}"


def _refuse_less_exact(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Raises TypeError if one of the gradients is computed from variables in another dtype than float64."""

    def reads(op: tf.Operation) -> bool:
        return any(tensor.dtype == tf.resource for tensor in op.inputs) and any(t.dtype.is_floating for t in op.outputs)

    for grad in (tf.convert_to_tensor(grad) for grad in grads if grad is not None):
        least = least_exact([grad], [op for op in grad.graph.get_operations() if reads(op)])
        if least.dtype != tf.float64:
            raise TypeError(f"{least.op.type} ({line_of(least.op)}) computes in {least.dtype.name}")


def _compared(
    towers: keras.Model, alone: keras.Model, rows, variables: Sequence[keras.Variable], count: int,
    normalizes: bool, dtype: str,
) -> str:  # fmt: skip
    """Does the steps and compares the variables, which have their values of before then; returns a line for people."""
    before, weights = [v.numpy() for v in variables], {id(variable) for variable in alone.trainable_variables}
    metrics = {id(variable) for variable in alone.metrics_variables}
    compared = [i for i, variable in enumerate(variables) if id(variable) not in metrics]

    def after(model: keras.Model, seed: int | None = None) -> list[np.ndarray]:
        for v, value in zip(variables, before, strict=True):
            v.assign(value if seed is None or id(v) not in weights else rounded(value, epsilon(value.dtype), seed))
        for _ in range(STEPS):
            compat.train_on(model, rows)
        return [variables[i].numpy() for i in compared]

    about = f", {dtype}" + ", the same for each tower, as batch normalisation is by tower" * normalizes
    try:
        names = [variables[i].path for i in compared]
        begun = {i: before[j] for i, j in enumerate(compared) if id(variables[j]) in weights}
        return compare_values(names, after(alone), after(towers), lambda s: after(alone, s), begun, count, about)
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _rows(data: Sequence, count: int, normalizes: bool):
    """Returns the batch of a step; with batch normalisation the same for each tower, so that all have the
    same statistics."""
    size, read, batches = EACH * count, 0, []
    for batch in compat.batches(*data, size):
        batches.append(keras.utils.unpack_x_y_sample_weight(batch))
        read += int(parts.batch_size(batches[-1]))
        if read >= size:
            break
    else:
        raise errors.ConfigError(f"check: there are fewer than {size} examples, {EACH} for each of {count} towers.")

    def first(*leaves):
        together = _concatenated(leaves)
        return (
            _concatenated([parts.rows_of(together, 0, EACH)] * count)
            if normalizes
            else parts.rows_of(together, 0, size)
        )

    return keras.utils.pack_x_y_sample_weight(  # as fit does, which gives a step x alone as it is
        *(None if part[0] is None else keras.tree.map_structure(first, *part) for part in zip(*batches, strict=True))
    )


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
