"""Shows on a few examples that the towers of a Keras model train what one device trains."""

from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np

from tower_train import errors
from tower_train.fronts import compat

STEPS, EACH = 2, 4  # examples of a tower
NEARBY = 4  # trainings from rounded weights
_FEW_ROUNDINGS, _SENSITIVITY = 256, 100  # as in tower_train.proof.towers


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
        return [rounded(b, seed) if id(v) in weights else b for v, b in zip(variables, before, strict=True)]

    def after(model: keras.Model, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        _assign(variables, values)
        for _ in range(STEPS):
            model.train_on_batch(*rows)
        return [variable.numpy() for variable in variables]

    try:
        expected, received = after(alone, before), after(towers, before)
        # Several, as gradients of nothing but rounding (of a bias before batch normalisation) are steps of Adam too.
        noise = zip(*(after(alone, nearby(seed)) for seed in range(NEARBY)), strict=True)
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


def rounded(value: np.ndarray, seed: int) -> np.ndarray:
    """Returns a value with each number rounded to one side or the other."""
    return value * (1 + np.finfo(value.dtype).eps * np.random.default_rng(seed).choice([-1, 1], value.shape))


def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def compare_values(values: Iterable[tuple], count: int, normalizes: bool) -> str:
    """Compares the values of variables after the steps.

    Args:
      values: (name, of one device, of the towers, several of one device whose weights were rounded); arrays.
      count: of the towers.
      normalizes: whether all towers had the same examples.

    Returns:
      A line for people.

    Raises:
      GraphError: rounding does not explain the difference of a variable; the message names it.
    """
    largest, about = 0.0, f"{STEPS} steps of {EACH * count} examples"
    for name, one, several, nearby in values:
        if not np.issubdtype(one.dtype, np.floating):
            continue
        scale, distance, *noises = (
            np.abs(each).max(initial=0) for each in (one, one - several, *(one - each for each in nearby))
        )
        noise = max(noises)
        if not distance <= max(_FEW_ROUNDINGS * np.finfo(one.dtype).eps * scale, _SENSITIVITY * noise):
            raise errors.GraphError(
                f"{count} towers differ from one device on this model: {name} by {distance / (scale or 1):.0e} after "
                f"{about}. A layer or a loss computes over the examples of a batch, of which a tower has a part only, "
                "or draws random numbers by tower."
            )
        largest = max(largest, distance / max(scale, 1))
    about += ", the same for each tower, as batch normalisation is by tower" if normalizes else ""
    return f"{count} towers equal one device on this model to {largest:.0e} ({about})"
