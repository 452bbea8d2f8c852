"""Shows on a few examples that the towers of a Keras model train what one device trains."""

from collections.abc import Callable, Sequence

import keras
import numpy as np

from tower_train import errors
from tower_train.fronts import compat
from tower_train.proof.rounding import EACH, SEEDS, STEPS, compare_values, epsilon, rounded


def compare_steps(
    towers: keras.Model, alone: keras.Model, batch: Sequence, count: int,
    optimizers_for: Callable[[Sequence], Sequence[keras.optimizers.Optimizer]],
) -> str:  # fmt: skip
    """Compares two steps of a model's towers with two of one device, and leaves the model as it was.

    Args:
      towers, alone: compiled models with the same variables, one of which has towers.
      batch: x, y, sample_weight.
      count: of the towers.
      optimizers_for: returns the optimizers of a step on a batch, with their variables.

    Returns:
      A line for people.

    Raises:
      ConfigError: there are too few examples, or the model cannot be compared.
      GraphError: a variable differs by more than rounding.
    """
    normalizes = any(isinstance(each, keras.layers.BatchNormalization) for each in compat.sublayers(alone))
    if normalizes and any(compat.is_seed_state(variable) for variable in alone.variables):
        raise errors.ConfigError(
            "check: batch normalisation is by tower and random numbers are by example, so that a model with both "
            "cannot be compared. Check it without its random layers."
        )
    rows = _rows(batch, count, normalizes)
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


def _rows(batch: Sequence, count: int, normalizes: bool) -> list:
    """Returns x, y and sample_weight of a step; with batch normalisation the same for each tower, so that all have the
    same statistics."""
    size = EACH * count

    def first(values):
        values = np.asarray(values)
        if len(values) < size:
            raise errors.ConfigError(f"check: there are fewer than {size} examples, {EACH} for each of {count} towers.")
        return np.concatenate([values[:EACH]] * count) if normalizes else values[:size]

    return [None if part is None else keras.tree.map_structure(first, part) for part in batch]


def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
