"""The limit of what rounding explains, and the comparison of two trainings by it: for Keras models and Estimators."""

from collections.abc import Collection, Iterable, Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.random_state import ancestors

SENSITIVITY = 100  # differences that are at most this times what one rounding of each weight changes are none
# Of trainings from rounded weights: several, as Adam takes whole steps by gradients of nothing but rounding too (of a
# bias before batch normalisation).
SEEDS = range(4)
MOST_NOISE = 1e-3  # of towers that are said to be equal
STEPS, EACH = 2, 4  # of a comparison; examples of a tower


def epsilon(dtype: np.dtype) -> float:
    """Returns the relative step between the numbers of a type, bfloat16 included; 0 for whole numbers and booleans."""
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def few_roundings(rounding: float) -> float:
    """Returns the relative difference up to which numbers count as equal: 256 roundings, or 1e-10."""
    return max(256 * rounding, 1e-10)


def rounded(value: np.ndarray, rounding: float, seed: int) -> np.ndarray:
    """Returns a value with each number rounded to one side or the other."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return (value * (1 + rounding * signs)).astype(value.dtype)


def least_exact(losses: Sequence[tf.Tensor], weights: Collection[tf.Operation]) -> tf.Tensor:
    """Returns the tensor of the least exact dtype on the way from weights to losses.

    Args:
      losses: of one graph.
      weights: the operations that hold them.
    """
    reached, tensors, before = set(weights), list(losses), ancestors([loss.op for loss in losses])
    for op in losses[0].graph.get_operations():  # in the order of their creation, so after their inputs
        if op in before and any(tensor.op in reached for tensor in op.inputs):
            reached.add(op)
            tensors += [tensor for tensor in op.outputs if tensor.dtype.is_floating]
    return min(tensors, key=lambda tensor: (tensor.dtype.size, tensor.dtype == tf.float16))


def compare_values(
    names: Sequence[str], one: Sequence, several: Sequence, nearby: Iterable[Sequence], count: int, about: str
) -> str:
    """Compares the values of variables after the steps.

    Args:
      names: of the variables.
      one, several: their values with one device and with the towers, arrays.
      nearby: the values with one device whose weights were rounded, one training after the other, as far as needed.
      count: of the towers.
      about: what else was the same, for the line.

    Returns:
      A line for people.

    Raises:
      GraphError: rounding does not explain the difference of a variable; the message names it.
    """
    about = f"{STEPS} steps of {EACH * count} examples{about}"
    distances, noise, nearby = list(map(_distance, one, several)), [0.0] * len(names), iter(nearby)
    scales = [np.abs(value).max(initial=0) for value in one]
    limits = [few_roundings(epsilon(v.dtype)) * scale for v, scale in zip(one, scales, strict=True)]
    while differing := [i for i, d in enumerate(distances) if not d <= max(limits[i], SENSITIVITY * noise[i])]:
        if (other := next(nearby, None)) is None:
            i = differing[0]
            raise errors.GraphError(
                f"{count} towers differ from one device on this model: {names[i]} by "
                f"{distances[i] / (scales[i] or 1):.0e} after {about}. A layer or a loss computes over the examples of "
                "a batch, of which a tower has a part only, or draws random numbers by tower."
            )
        noise = list(map(max, noise, map(_distance, one, other)))
    largest = max(distance / max(scale, 1) for distance, scale in zip(distances, scales, strict=True))
    if largest > MOST_NOISE:
        return (
            f"*** {count} towers differ from one device by {largest:.0e}, as one device does once its weights are "
            "rounded: this model magnifies roundings so much that nothing can be told"
        )
    return f"{count} towers equal one device on this model to {largest:.0e} ({about})"


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    wide = np.result_type(one.dtype, np.float64)  # of unsigned numbers too
    return np.abs(one.astype(wide) - other.astype(wide)).max(initial=0)
