"""Tensors of all towers in one: how the towers' elements lie in it, and the ways in and out."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """A tensor that all towers have the same of."""

    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Apart:
    """A tensor of each tower.

    Attributes:
      tensors: over towers.
      axis: where they are laid end to end if need be.
    """

    tensors: Sequence[tf.Tensor]
    axis: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """The towers' tensors end to end along one axis.

    Where the axis came to be by joining axes, of which the batch was not the first, the towers take turns in it: it
    consists of `outer` parts, and each of these of one part of each tower.

    Attributes:
      tensor: that of all towers; along `axis` its size is the number of towers times that in `shape`.
      shape: of one tower's.
      axis: from 0.
      outer: a divisor of shape[axis].
    """

    tensor: tf.Tensor
    shape: tuple[int, ...]
    axis: int
    outer: int = 1

    @property
    def place(self) -> tuple[int, int, int]:
        """The axis from the end (from -1), its size in one tower, and outer."""
        return self.axis - len(self.shape), self.shape[self.axis], self.outer

    @property
    def before(self) -> int:
        """The parts that the whole tensor consists of, in each of which each tower has one part."""
        return math.prod(self.shape[: self.axis]) * self.outer


Value = Same | Apart | Joined


def static_shape(tensor: tf.Tensor) -> tuple[int, ...] | None:
    """Returns a tensor's shape; None if it is not known, or holds nothing that could be joined."""
    return tuple(tensor.shape.as_list()) if tensor.shape.num_elements() else None


def scaled(shape: Sequence[int], axis: int, towers: int) -> list[int]:
    """The shape of the tensor of so many towers."""
    return [size * towers if i == axis else size for i, size in enumerate(shape)]


def join(value: Apart) -> Joined | None:
    """Lays the towers' tensors end to end; None if they are scalars, or their shapes are not known or not the same."""
    shapes = {static_shape(tensor) for tensor in value.tensors}
    if len(shapes) > 1 or not (shape := shapes.pop()):
        return None
    axis = value.axis if value.axis < len(shape) else 0
    return Joined(tf.concat(value.tensors, axis), shape, axis)


def whole(tensors: Sequence[tf.Tensor]) -> Joined | None:
    """Returns what the towers' tensors were cut from, as tensor[begin:end], if these are all of it in order."""
    first, ops = tensors[0], [tensor.op for tensor in tensors]
    shape = static_shape(first)
    if any(op.type != "StridedSlice" or op.inputs[0] is not ops[0].inputs[0] for op in ops) or not shape:
        return None
    cuts = [[tf.get_static_value(place) for place in op.inputs[1:3]] for op in ops]
    expected = [[[i * shape[0]], [(i + 1) * shape[0]]] for i in range(len(ops))]
    if ops[0].inputs[0].shape.as_list() != scaled(shape, 0, len(ops)) or not np.array_equal(cuts, expected):
        return None
    return Joined(tf.identity(ops[0].inputs[0]), shape, 0)  # which has a name of its own, also where branches use it


def split(value: Value, towers: int) -> Sequence[tf.Tensor]:
    """Returns each tower's tensor."""
    if isinstance(value, Apart):
        return value.tensors
    if isinstance(value, Same):
        return [value.tensor] * towers
    if value.outer == 1:
        return tf.split(value.tensor, towers, value.axis)
    parts = tf.unstack(_in_parts(value, towers), axis=1)
    return [tf.reshape(part, value.shape) for part in parts]


def one_of(value: Value, tower: int, towers: int) -> tf.Tensor:
    """Returns one tower's tensor."""
    if isinstance(value, Joined):
        return tf.reshape(_in_parts(value, towers)[:, tower], value.shape)
    return value.tensors[tower] if isinstance(value, Apart) else value.tensor


def total(value: Value, towers: int) -> tf.Tensor:
    """Returns the sum over towers."""
    if isinstance(value, Joined):
        return tf.reshape(tf.reduce_sum(_in_parts(value, towers), axis=1), value.shape)
    return tf.add_n(value.tensors) if isinstance(value, Apart) else value.tensor * towers


def spread(value: Value, place: tuple[int, int, int], towers: int, broadcasts: bool = True) -> tf.Tensor | None:
    """Returns a tensor that goes with a joined one of this place.

    Args:
      value: Joined, or Same, which is repeated if it varies along the place's axis.
      place: as Joined.place.
      towers: how many.
      broadcasts: whether the operation broadcasts what has a size of 1 there.

    Returns:
      The tensor; None if there is none.
    """
    axis, size, outer = place
    if isinstance(value, Joined):
        return value.tensor if value.place == place else None
    shape = static_shape(value.tensor)
    if shape is None:
        return None
    if broadcasts and (len(shape) < -axis or shape[axis] == 1):
        return value.tensor
    if len(shape) < -axis or shape[axis] != size:
        return None
    axis += len(shape)
    parts = tf.reshape(value.tensor, [math.prod(shape[:axis]) * outer, 1, -1])
    return tf.reshape(tf.tile(parts, [1, towers, 1]), scaled(shape, axis, towers))


def reshaped(value: Joined, shape: Sequence[int], towers: int) -> Joined | None:
    """Gives all towers' tensors this shape; None if they would not lie along one axis."""
    places = []
    for axis, size in enumerate(shape):
        outer, rest = divmod(value.before, math.prod(shape[:axis]))
        if not rest and outer and not size % outer:
            places.append((axis, outer))
    if not places:
        return None
    chunk = value.shape[value.axis] // value.outer
    axis, outer = max(places, key=lambda place: (shape[place[0]] == chunk * place[1], -place[1]))
    tensor = tf.reshape(value.tensor, scaled(shape, axis, towers))
    return Joined(tensor, tuple(shape), axis, outer)


def _in_parts(value: Joined, towers: int) -> tf.Tensor:
    """[before, towers, the rest]."""
    return tf.reshape(value.tensor, [value.before, towers, -1])
