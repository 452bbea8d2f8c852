"""The towers' parts of a batch, and their rows of draws for the whole batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train.graph.devices import HOST

Size = int | tf.Tensor  # an integer if static


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tower's rows of a tensor.

    Attributes:
      rows: their number.
      begin: the first one's index in the batch.
      batch: the rows of all towers.
    """

    rows: Size
    begin: Size
    batch: Size


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
      share: float scalar, the first over the second.
    """

    index: int
    count: int
    data: Any
    cuts: tuple[Cut, ...]
    examples: tf.Tensor
    total: tf.Tensor
    share: tf.Tensor

    def rows_of_draw(self, size: Size) -> tuple[Size, tf.Tensor] | None:
        """Chooses a tower's rows of random numbers that are drawn for the whole batch.

        Args:
          size: the rows that the tower draws.

        Returns:
          The number of rows to draw, and the indices of the tower's. None if the draw is not by example: its size is
            fixed, and not a multiple of the tower's examples. A varying size that is no multiple of them either gets
            numbers of the tower's own.
        """
        if isinstance(size, int):
            for cut in self.cuts:
                if isinstance(cut.rows, int) and size % cut.rows == 0:
                    return size // cut.rows * cut.batch, _spread(tf.range(size), cut)
            return None
        rows = tf.range(size)
        most = size + len(self.cuts)  # towers' rows of each tensor differ by one at most
        total, kept = self.count * most, self.index * most + rows
        for cut in reversed(self.cuts):
            fits = size % cut.rows == 0
            total = tf.where(fits, size // cut.rows * cut.batch, total)
            kept = tf.where(fits, _spread(rows, cut), kept)
        return total, kept


def split(data, towers: Sequence[int], count: int) -> list[Part]:
    """Cuts each tensor of a batch into consecutive parts for towers, whose sizes differ by one at most.

    Args:
      data: a structure of tensors [batch, ...], which need not have one batch size; None and scalars are everyone's.
      towers: indices of those whose parts are needed.
      count: of all towers.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)]
    with tf.device(HOST):
        total = tf.cast(batch_size(data), keras.config.floatx())
        return [_part(data, leaves, i, count, total) for i in towers]


def batch_size(data) -> Size:
    """Returns the examples of a batch: the rows of its first tensor."""
    return _size(next(leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)))


def _part(data, leaves: Sequence[tf.Tensor], index: int, count: int, total: tf.Tensor) -> Part:
    own = keras.tree.map_structure(lambda leaf: _own_rows(leaf, index, count) if _has_rows(leaf) else leaf, data)
    examples = tf.cast(_sizes(leaves[0], index, count)[1], total.dtype)
    return Part(
        index, count, own, tuple(_cut(leaf, index, count) for leaf in leaves), examples, total, examples / total
    )


def _cut(leaf: tf.Tensor, index: int, count: int) -> Cut:
    batch = _size(leaf)
    begin, size = _sizes(leaf, index, count)
    if isinstance(batch, int):
        return Cut(max(size, 1), min(begin, batch - 1), batch)
    return Cut(tf.maximum(size, 1), tf.minimum(begin, batch - 1), batch)


def _sizes(leaf: tf.Tensor, index: int, count: int) -> tuple[Size, Size]:
    """Returns the index of a tower's first row, and the number of its rows."""
    batch = _size(leaf)
    sizes = [(batch + count - 1 - i) // count for i in range(index + 1)]
    return sum(sizes[:-1]), sizes[-1]


def _own_rows(leaf: tf.Tensor, index: int, count: int) -> tf.Tensor:
    if count == 1:
        return leaf
    cut = _cut(leaf, index, count)
    return leaf[cut.begin : cut.begin + cut.rows]


def _has_rows(leaf) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _size(leaf: tf.Tensor) -> Size:
    return tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0]


def _spread(rows: tf.Tensor, cut: Cut) -> tf.Tensor:
    """Returns the indices in the whole batch of a tower's rows, which may be several consecutive batches."""
    return rows // cut.rows * cut.batch + cut.begin + rows % cut.rows
