"""Shows on a few examples that the towers of a Keras model train what one device trains."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.proof.rounding import EACH, SEEDS, STEPS, compare_values, epsilon, rounded


def compare_steps(
    towers: keras.Model, alone: keras.Model, data: Sequence, count: int,
    optimizers_for: Callable[[Sequence], Sequence[keras.optimizers.Optimizer]],
) -> str:  # fmt: skip
    """Compares two steps of a model's towers with two of one device, and leaves the model as it was.

    Args:
      towers, alone: compiled models with the same variables, one of which has towers.
      data: x, y, sample_weight, as `fit` takes them.
      count: of the towers.
      optimizers_for: returns the optimizers of a step on a batch, with their variables.

    Returns:
      A line for people.

    Raises:
      ConfigError: there are too few examples, or the model cannot be compared.
      GraphError: a variable differs by more than rounding.
    """
    normalizes = any(isinstance(each, keras.layers.BatchNormalization) for each in compat.sublayers(alone))
    rows = _rows(data, count, normalizes)
    of_optimizers = [variable for each in optimizers_for(rows) for variable in each.variables]
    variables = [*alone.variables, *of_optimizers, *alone.metrics_variables]
    before = [variable.numpy() for variable in variables]
    weights = {id(variable) for variable in alone.trainable_variables}

    def nearby(seed: int) -> list[np.ndarray]:
        return [
            rounded(b, epsilon(b.dtype), seed) if id(v) in weights else b
            for v, b in zip(variables, before, strict=True)
        ]

    def after(model: keras.Model, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        _assign(variables, values)
        for _ in range(STEPS):
            model.train_on_batch(*rows)
        return [variable.numpy() for variable in variables]

    try:
        with _drawn_alike(count, towers, alone) if normalizes else contextlib.nullcontext():
            expected, received = after(alone, before), after(towers, before)
            noise = zip(*(after(alone, nearby(seed)) for seed in SEEDS), strict=True)
    finally:
        _assign(variables, before)
    metrics = {id(variable) for variable in alone.metrics_variables}
    return compare_values(
        (
            (variable.path, *values)
            for variable, *values in zip(variables, expected, received, noise, strict=True)
            if id(variable) not in metrics
        ),
        count,
        normalizes,
    )


def _rows(data: Sequence, count: int, normalizes: bool) -> list:
    """Returns x, y and sample_weight of a step; with batch normalisation the same for each tower, so that all have the
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

    return [None if part[0] is None else keras.tree.map_structure(first, *part) for part in zip(*batches, strict=True)]


def _concatenated(leaves: Sequence):
    return tf.sparse.concat(0, leaves) if isinstance(leaves[0], tf.SparseTensor) else tf.concat(leaves, 0)


@contextlib.contextmanager
def _drawn_alike(count: int, *models: keras.Model) -> Iterator[None]:
    """Makes layers draw the same random numbers for each tower's examples within this block, so that batches that are
    the same stay so. Functions that models have traced are forgotten."""

    def alike(size):
        return None if not tf.is_tensor(size) and size % count else (size, tf.range(size) % (size // count))

    def refuse(name):
        raise errors.ConfigError(
            f"check: keras.random.{name} cannot draw the same for each tower, as batch normalisation by tower "
            "needs. Check the model without that layer."
        )

    def forget():
        for model in models:
            model.train_function = None

    forget()
    try:
        with compat.drawn_for_more(alike, refuse):
            yield
    finally:
        forget()


def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
