"""The towers' parts of a batch, and their rows of random numbers that are drawn for the whole batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train.graph.devices import HOST

Size = int | tf.Tensor  # an integer if static


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tower's rows of a tensor; a tower without examples has the last row.

    Attributes:
      rows: their number.
      begin: the first one's index in the batch.
      batch: the rows of all towers.
      examples: 0 or `rows`.
    """

    rows: Size
    begin: Size
    batch: Size
    examples: Size

    def of_draw(self, size: Size) -> tuple[Size, tf.Tensor]:
        """Returns how many rows to draw for all towers, and the indices of this one's `size`, which may be those of
        several consecutive batches."""
        rows = tf.range(size)
        kept = rows // self.rows * self.batch + self.begin + rows % self.rows
        return (size + self.rows - 1) // self.rows * self.batch, kept


def cut(batch: Size, index: int, count: int) -> Cut:
    """Cuts a batch into consecutive parts whose sizes differ by one at most; returns one of them."""
    low, high = (min, max) if isinstance(batch, int) else (tf.minimum, tf.maximum)
    begin, end = (i * (batch // count) + low(i, batch % count) for i in (index, index + 1))
    return Cut(high(end - begin, 1), low(begin, batch - 1), batch, end - begin)


def cut_of_draw(cuts: Sequence[Cut], size: Size) -> tuple[Size, tf.Tensor] | None:
    """Chooses a tower's rows of random numbers that are drawn for the whole batch.

    Args:
      cuts: of the tower's tensors.
      size: the rows that the tower draws, by example if they are a multiple of a tensor's rows.

    Returns:
      As Cut.of_draw; None if a fixed size is of no example. A varying one gets numbers of the tower's own.
    """
    if isinstance(size, int):
        fitting = [each for each in cuts if isinstance(each.rows, int) and size % each.rows == 0]
        return fitting[0].of_draw(size) if fitting else None
    total, kept = cuts[0].of_draw(size)
    for each in reversed(cuts):
        fits = size % each.rows == 0
        total, kept = (tf.where(fits, new, old) for new, old in zip(each.of_draw(size), (total, kept), strict=True))
    return total, kept


@dataclasses.dataclass(frozen=True)
class Part:
    """A tower's part of a batch; a tower without examples has a copy of the last one.

    Attributes:
      index: of the tower.
      count: of all towers.
      data: structured as the batch.
      cuts: of its tensors.
      examples: float scalar, the tower's examples in the first tensor.
      total: float scalar, those of all towers.
    """

    index: int
    count: int
    data: Any
    cuts: tuple[Cut, ...]
    examples: tf.Tensor
    total: tf.Tensor

    @property
    def share(self) -> tf.Tensor:
        """Float scalar, the tower's share of the examples."""
        return self.examples / self.total


def split(data, towers: Sequence[int], count: int) -> list[Part]:
    """Cuts each tensor of a batch into the towers' parts.

    Args:
      data: a structure of dense, sparse or ragged tensors [batch, ...], which need not have one batch size; None and
        scalars are everyone's.
      towers: indices of those whose parts are needed.
      count: of all towers.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)]
    parts = []
    with tf.device(HOST):
        total = tf.cast(batch_size(data), keras.config.floatx())
        for index in towers:
            cuts = [cut(_size(leaf), index, count) for leaf in leaves]
            rows = {id(leaf): rows_of(leaf, c.begin, c.rows) for leaf, c in zip(leaves, cuts, strict=True) if count > 1}
            of_tower = keras.tree.map_structure(lambda leaf: rows.get(id(leaf), leaf), data)  # noqa: B023
            parts.append(Part(index, count, of_tower, tuple(cuts), tf.cast(cuts[0].examples, total.dtype), total))
    return parts


def batch_size(data) -> Size:
    """Returns the examples of a batch: the rows of its first tensor."""
    return _size(next(leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)))


def rows_of(tensor, begin: Size, rows: Size):
    """Returns consecutive rows of a dense, ragged or sparse tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin : begin + rows]
    others = tensor.dense_shape[1:]
    first = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(others)], axis=0)
    sliced = tf.sparse.slice(tensor, first, tf.concat([[tf.cast(rows, tf.int64)], others], axis=0))
    sliced.set_shape([None, *tensor.shape[1:]])
    return sliced


def as_tensor(leaf):
    """Returns a leaf of a batch as a tensor; None, sparse and ragged ones as they are."""
    return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _has_rows(leaf) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _size(leaf) -> Size:
    if leaf.shape.rank and leaf.shape[0] is not None:
        return leaf.shape[0]
    if isinstance(leaf, tf.Tensor):
        return tf.shape(leaf)[0]
    return tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0], tf.int32)
