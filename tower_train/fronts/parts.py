"""The towers' parts of a batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train.graph.devices import HOST

Size = int | tf.Tensor  # an integer if static


class Cut(NamedTuple):
    """A tower's rows of a tensor; a tower without examples has the last row, if there is any."""

    rows: Size  # their number
    begin: Size  # the first one's index in the batch
    batch: Size  # the rows of all towers
    examples: Size  # 0 or `rows`


def cut(batch: Size, index: int, count: int) -> Cut:
    """Cuts a batch into consecutive parts whose sizes differ by one at most; returns one of them."""
    low, high = (min, max) if isinstance(batch, int) else (tf.minimum, tf.maximum)
    begin, end = (i * (batch // count) + low(i, batch % count) for i in (index, index + 1))
    return Cut(high(end - begin, 1), high(low(begin, batch - 1), 0), batch, end - begin)


class Part(NamedTuple):
    """A tower's part of a batch; a tower without examples has a copy of the last one."""

    data: Any  # structured as the batch
    cuts: tuple[Cut, ...]  # of its tensors; none of a tower by itself
    share: tf.Tensor  # float scalar, the tower's share of the examples in the first tensor; 1 / towers if it has none


def split(data, first: int, here: int, count: int) -> list[Part]:
    """Cuts each tensor of a batch, dense, sparse or ragged, into the parts of `count` towers; returns `here` from the
    first one on. They need not have one batch size; None and scalars are everyone's."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)]
    parts = []
    with tf.device(HOST):
        for index in range(first, first + here):
            cuts = tuple(cut(_size(leaf), index, count) for leaf in leaves)
            rows = {
                id(leaf): cut_rows(leaf, c.begin, c.rows) for leaf, c in zip(leaves, cuts, strict=True) if count > 1
            }
            own_data = keras.tree.map_structure(lambda leaf: rows.get(id(leaf), leaf), data)  # noqa: B023
            examples, batch = (tf.cast(size, keras.config.floatx()) for size in (cuts[0].examples, cuts[0].batch))
            share = tf.where(batch > 0, examples / batch, 1 / count)
            parts.append(Part(own_data, cuts if count > 1 else (), share))
    return parts


def batch_size(data) -> Size:
    """Returns the examples of a batch: the rows of its first tensor."""
    return _size(next(leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)))


def sizes(data) -> list[Size]:
    """Returns the rows of each tensor of a batch that has any."""
    return [_size(leaf) for leaf in tf.nest.flatten(data) if _has_rows(leaf)]


def lengths(data) -> list[Size]:
    """Returns the lengths of a batch's sequences, which are [batch, time] of integers or [batch, time, features]."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor)]
    sequences = [leaf for leaf in leaves if leaf.shape.rank == 3 or leaf.shape.rank == 2 and leaf.dtype.is_integer]
    sizes = [tf.compat.dimension_value(leaf.shape[1]) for leaf in sequences]
    unknown = [tf.shape(leaf)[1] for leaf, size in zip(sequences, sizes, strict=True) if size is None]
    return [*dict.fromkeys(size for size in sizes if size is not None), *unknown]


def cut_rows(tensor, begin: Size, rows: Size):
    """Returns consecutive rows of a dense, ragged or sparse tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin : begin + rows]
    others = tensor.dense_shape[1:]
    first = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(others)], axis=0)
    sliced = tf.sparse.slice(tensor, first, tf.concat([[tf.cast(rows, tf.int64)], others], axis=0))
    sliced.set_shape([None, *tensor.shape[1:]])
    return sliced


def joined(tensors: Sequence):
    """Returns the rows of dense, ragged or sparse tensors, one after the other."""
    return tf.sparse.concat(0, list(tensors)) if isinstance(tensors[0], tf.SparseTensor) else tf.concat(tensors, 0)


def as_tensor(leaf):
    """Returns a leaf of a batch as a tensor; None, sparse and ragged ones as they are."""
    return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _has_rows(leaf) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _size(leaf) -> Size:
    size = tf.compat.dimension_value(leaf.shape[0]) if leaf.shape.rank else None  # TensorFlow 1 has a Dimension
    if size is not None:
        return size
    if isinstance(leaf, tf.Tensor):
        return tf.shape(leaf)[0]
    return tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.dense_shape[0], tf.int32)
