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
      data: a structure of dense, sparse or ragged tensors [batch, ...], which need not have one batch size; None and
        scalars are everyone's.
      towers: indices of those whose parts are needed.
      count: of all towers.
    """

    def part(index):
        cuts = {id(leaf): _cut(leaf, index, count) for leaf in leaves}
        of_tower = keras.tree.map_structure(
            lambda leaf: rows_of(leaf, cuts[id(leaf)].begin, cuts[id(leaf)].rows) if count > 1 and _has_rows(leaf)
            else leaf, data,
        )  # fmt: skip
        examples = tf.cast(_sizes(leaves[0], index, count)[1], keras.config.floatx())
        return Part(index, count, of_tower, tuple(cuts.values()), examples, total)

    leaves = [leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)]
    with tf.device(HOST):
        total = tf.cast(batch_size(data), keras.config.floatx())
        return [part(index) for index in towers]


def batch_size(data) -> Size:
    """Returns the examples of a batch: the rows of its first tensor."""
    return _size(next(leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)))


def rows_of(tensor, begin: Size, rows: Size):
    """Returns consecutive rows of a dense, ragged or sparse tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin : begin + rows]
    others = tensor.dense_shape[1:]
    first = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(others)], axis=0)
    found = tf.sparse.slice(tensor, first, tf.concat([[tf.cast(rows, tf.int64)], others], axis=0))
    found.set_shape([None, *tensor.shape[1:]])
    return found


def as_tensor(leaf):
    """Returns a leaf of a batch as a tensor; None, sparse and ragged ones as they are."""
    return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def spec_of(leaf) -> tf.TypeSpec:
    """Returns the dtype and shape of a dense, sparse or ragged tensor."""
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, tf.Tensor) else tf.type_spec_from_value(leaf)


def _cut(leaf, index: int, count: int) -> Cut:
    batch = _size(leaf)
    begin, size = _sizes(leaf, index, count)
    if isinstance(batch, int):
        return Cut(max(size, 1), min(begin, batch - 1), batch)
    return Cut(tf.maximum(size, 1), tf.minimum(begin, batch - 1), batch)


def _sizes(leaf, index: int, count: int) -> tuple[Size, Size]:
    """Returns the index of a tower's first row, and the number of its rows."""
    batch = _size(leaf)
    sizes = [(batch + count - 1 - i) // count for i in range(index + 1)]
    return sum(sizes[:-1]), sizes[-1]


def _has_rows(leaf) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _size(leaf) -> Size:
    if leaf.shape.rank and leaf.shape[0] is not None:
        return leaf.shape[0]
    if isinstance(leaf, tf.Tensor):
        return tf.shape(leaf)[0]
    return tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0], tf.int32)


def _spread(rows: tf.Tensor, cut: Cut) -> tf.Tensor:
    """Returns the indices in the whole batch of a tower's rows, which may be several consecutive batches."""
    return rows // cut.rows * cut.batch + cut.begin + rows % cut.rows
