"""The limit of what rounding explains."""

from collections.abc import Collection, Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

from tower_train.graph.random_state import ancestors

_SENSITIVITY = 100  # differences that are at most this times what one rounding of each weight changes are none
# Of trainings from rounded weights: several, as Adam takes whole steps by gradients of nothing but rounding too (of a
# bias before batch normalisation), and further and further away, as kernels round more than once, and the kink of an
# activation (a single ReLU that flips) shows from there only.
SEEDS = range(4)
MOST_NOISE = 1e-3  # of towers that are said to be equal


def epsilon(dtype: np.dtype) -> float:
    """Returns the relative step between the numbers of a type, bfloat16 included; 0 for whole numbers and booleans."""
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def few_roundings(rounding: float) -> float:
    """Returns the relative difference up to which numbers count as equal: 256 roundings, or 1e-10; at most 1e-3."""
    return min(max(256 * rounding, 1e-10), MOST_NOISE)


def rounded(value: np.ndarray, rounding: float, seed: int) -> np.ndarray:
    """Returns a value with each number moved by 4**seed roundings to one side or the other.

    So is a matrix of nothing but zeros, as if of ones: before it moves, gradients may cancel but for their roundings,
    which roundings of other weights do not reach. Not a bias, as zeros may be at the kink of an activation.
    """
    moves = rounding * 4**seed * np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return (value * (1 + moves) if value.ndim < 2 or value.any() else moves).astype(value.dtype)


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
