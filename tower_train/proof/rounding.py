"""The limit of what rounding explains, and the comparison of two trainings by it: for Keras models and Estimators."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.random_state import ancestors

_SENSITIVITY = 100  # differences that are at most this times what one rounding of each weight changes are none
# Of trainings from rounded weights: several, as Adam takes whole steps by gradients of nothing but rounding too (of a
# bias before batch normalisation), and further and further away, as kernels round more than once, and the kink of an
# activation (a single ReLU that flips) shows from there only.
SEEDS = range(4)
MOST_NOISE = 1e-3  # of towers that are said to be equal
STEPS, EACH = 2, 4  # of a comparison; examples of a tower


def epsilon(dtype: np.dtype) -> float:
    """Returns the relative step between the numbers of a type, bfloat16 included; 0 for whole numbers and booleans."""
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def few_roundings(rounding: float) -> float:
    """Returns the relative difference up to which numbers count as equal: 256 roundings, or 1e-10; at most 1e-3."""
    return min(max(256 * rounding, 1e-10), MOST_NOISE)


def rounded(value: np.ndarray, rounding: float, seed: int) -> np.ndarray:
    """Returns a value with each number moved by 4**seed roundings to one side or the other."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return (value * (1 + rounding * 4**seed * signs)).astype(value.dtype)


def explained(change: float, seed: int) -> float:
    """Returns the difference up to which rounding explains one, by the change that `rounded` weights make."""
    return _SENSITIVITY / 4**seed * change


def largest(value) -> float:
    """Returns the largest finite magnitude in an array."""
    value = np.abs(np.asarray(value))
    found = value.max(initial=0)
    return float(found if np.isfinite(found) else value[np.isfinite(value)].max(initial=0))


def distance(one, other) -> float:
    """Returns the largest difference of two arrays; inf if it is not finite where they differ."""
    one, other = (np.asarray(value) for value in (one, other))
    if one.dtype.kind not in "fc":
        one, other = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        absolute = np.abs(one - other).max(initial=0)
        if not np.isfinite(absolute):  # both may be: that is no difference
            apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0, np.abs(one - other))
            absolute = np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0)
    return float(absolute)


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


def not_finite(count: int) -> str:
    """Returns the line for people of a training of so many towers that ends with no numbers."""
    return f"*** towers: nothing to compare: the loss of {EACH * count} examples is not finite, or its gradients"


def compare_values(
    names: Sequence[str], one: Sequence, several: Sequence, nearby: Callable[[int | None], Sequence], before: Mapping,
    count: int, about: str,
) -> str:  # fmt: skip
    """Compares the values of variables after the steps.

    Args:
      names: of the variables.
      one, several: their values with one device and with the towers, arrays.
      nearby: seed -> the values with one device whose weights were `rounded` by it; None: by nothing.
      before: {index: value before the steps} of the weights.
      count: of the towers.
      about: what else was the same, for the line.

    Returns:
      A line for people.

    Raises:
      GraphError: rounding does not explain the difference of a variable; the message names it.
    """
    steps = f"{STEPS} steps of {EACH * count} examples"
    distances, scales = list(map(distance, one, several)), list(map(largest, one))
    limits = [few_roundings(epsilon(v.dtype)) * scale for v, scale in zip(one, scales, strict=True)]

    def beyond(distances: Iterable[float]) -> list[int]:
        return [i for i, apart in enumerate(distances) if apart > limits[i]]

    if beyond(distances) and not beyond(map(distance, one, nearby(None))):  # else it draws anew each time
        for seed in SEEDS:
            noise = map(distance, one, nearby(seed))
            limits = [max(limit, explained(each, seed)) for limit, each in zip(limits, noise, strict=True)]
            if not beyond(distances):
                break
    for i in beyond(distances):
        raise errors.GraphError(
            f"{count} towers differ from one device on this model: {names[i]} by "
            f"{distances[i] / (scales[i] or 1):.0e} after {steps}{about}. A layer or a loss computes over the examples "
            "of a batch, of which a tower has a part only, or draws random numbers by tower, or gradients are clipped "
            "before they are averaged."
        )
    if not all(np.isfinite(one[i]).all() for i in before):
        return not_finite(count)
    if all(_is_scaled(value, one[i]) for i, value in before.items()):
        return f"*** towers: nothing to compare: no weight changes in {steps}, but for weight decay"
    gap = max(apart / max(scale, 1) for apart, scale in zip(distances, scales, strict=True))
    if gap > MOST_NOISE:
        return (
            f"*** {count} towers differ from one device by {gap:.0e}, as one device does once its weights are "
            "rounded: this model magnifies roundings so much that nothing can be told"
        )
    return f"{count} towers equal one device on this model to {gap:.0e} ({steps}{about})"


def _is_scaled(before: np.ndarray, after: np.ndarray) -> bool:
    """Returns whether an array has not changed but by a factor, as by weight decay alone."""
    before, change = np.float64(before).ravel(), np.float64(after).ravel() - np.float64(before).ravel()
    if before.size < 2 or not change.any():  # any change of a single number is a factor
        return not change.any()
    i = np.abs(before).argmax()
    rate = change[i] / before[i] if before[i] else 0.0
    return largest(change - rate * before) <= 0.01 * largest(change)
