"""Values of the towers of several workers, brought together; a process by itself has them all."""

import enum
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import joined
from tower_train.fronts.workers import Workers


class Kind(enum.Enum):
    """Ways in which the workers' tensors become one."""

    ROWS = enum.auto()  # one after the other
    SUM = enum.auto()
    BEFORE = enum.auto()  # the sum over the workers before this one
    CHIEFS = enum.auto()  # the chief's


Exchange = Callable[[Sequence[tuple[Kind, tf.Tensor]]], list[tf.Tensor]]


def alone(own: Sequence[tuple[Kind, tf.Tensor]]) -> list[tf.Tensor]:
    """The Exchange of a process by itself."""
    return [tf.zeros_like(tensor) if kind is Kind.BEFORE else tensor for kind, tensor in own]


def between(workers: Workers) -> Exchange:
    """The Exchange of a worker with the others. All must call it alike."""

    def exchange(own: Sequence[tuple[Kind, tf.Tensor]]) -> list[tf.Tensor]:
        kinds, tensors = [kind for kind, _ in own], [tensor for _, tensor in own]
        types = ", ".join(f"{kind.name} of {tensor.dtype.name}" for kind, tensor in own)
        if any(tensor.dtype == tf.string for tensor in tensors):
            raise errors.ConfigError(
                "tower_step joins strings, or gives them to a metric, which workers cannot send to each other. Give "
                "numbers."
            )

        def over_workers(*arrays):
            parts = workers.gather("an exchange of tower_step", arrays, **{"what is exchanged": types})
            found = zip(kinds, zip(*parts, strict=True), strict=True)
            return [_merged(kind, of_workers, workers.rank) for kind, of_workers in found]

        merged = joined.exchanged(over_workers, tensors) if tensors else []
        for kind, tensor, whole in zip(kinds, tensors, merged, strict=True):
            whole.set_shape([None, *tensor.shape[1:]] if kind is Kind.ROWS else tensor.shape)
        return merged

    return exchange


def _merged(kind: Kind, of_workers: Sequence[np.ndarray], rank: int) -> np.ndarray:
    if kind is Kind.ROWS:
        return np.concatenate(of_workers)
    if kind is Kind.CHIEFS:
        return of_workers[0]
    counted = of_workers if kind is Kind.SUM else of_workers[:rank]
    return functools.reduce(np.add, counted, np.zeros_like(of_workers[0]))
