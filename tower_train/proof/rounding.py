"""The limit of what rounding explains, and the comparison of two trainings by it: for Keras models and Estimators."""

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from tower_train import errors

FEW_ROUNDINGS = 256  # relative differences of so many roundings are none
SENSITIVITY = 100  # and so are differences that are at most this times what one rounding of each weight changes
# Of trainings from rounded weights: several, as Adam takes whole steps by gradients of nothing but rounding too (of a
# bias before batch normalisation).
SEEDS = range(4)
MOST_NOISE = 1e-3  # of towers that are said to be equal
STEPS, EACH = 2, 4  # of a comparison; examples of a tower


def epsilon(dtype: np.dtype) -> float:
    """Returns the relative step between the numbers of a type, bfloat16 included; 0 for whole numbers and booleans."""
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def rounded(value: np.ndarray, rounding: float, seed: int) -> np.ndarray:
    """Returns a value with each number rounded to one side or the other."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return (value * (1 + rounding * signs)).astype(value.dtype)


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
        wide = np.result_type(one.dtype, np.float64)  # of unsigned numbers too
        value, *others = (each.astype(wide) for each in (one, several, *nearby))
        scale, distance, *noises = (np.abs(each).max(initial=0) for each in (value, *(value - o for o in others)))
        if not distance <= max(FEW_ROUNDINGS * epsilon(one.dtype) * scale, SENSITIVITY * max(noises)):
            raise errors.GraphError(
                f"{count} towers differ from one device on this model: {name} by {distance / (scale or 1):.0e} after "
                f"{about}. A layer or a loss computes over the examples of a batch, of which a tower has a part only, "
                "or draws random numbers by tower."
            )
        largest = max(largest, distance / max(scale, 1))
    if largest > MOST_NOISE:
        return (
            f"*** {count} towers differ from one device by {largest:.0e}, as one device does once its weights are "
            "rounded: this model magnifies roundings so much that nothing can be told"
        )
    about += ", the same for each tower, as batch normalisation is by tower" if normalizes else ""
    return f"{count} towers equal one device on this model to {largest:.0e} ({about})"
