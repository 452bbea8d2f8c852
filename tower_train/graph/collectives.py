"""Collective operations between workers in a program's own graph, under keys made of names.

Each process builds its own graph, and collective operations of two graphs meet by an integer, their instance key. It
must be the same in all workers, whatever else is in a graph and in whatever order it was made.
"""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST, Devices

v1 = tf.compat.v1

_ATTRIBUTE = "tower_train_keys"  # of a graph
_GROUP = 3  # of the workers' hosts, as in all_reduce.py
_FIRST_KEY, _END_OF_KEYS = 2**24, 2**31 - 2**16  # above the keys of all other collective operations
# Types that TensorFlow neither gathers nor broadcasts, and their substitutes; narrower ones as int32.
_SAME_BITS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64}
_NARROW = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers between which a graph's operations average, gather and broadcast.

    Attributes:
      placed: the devices of this one, with the number of workers and its own index.
      compare: called with what this worker means, {name: text}; returns once the others are known to mean the same.
    """

    placed: Devices
    compare: Callable[[Mapping[str, str]], None]

    @property
    def size(self) -> int:
        return self.placed.num_workers

    @property
    def device(self) -> str:
        """The part of a device's name that separates this worker's from another's.

        Sessions outside of the cluster, in which operations on it would wait for ever, refuse them.
        """
        return f"/job:worker/replica:0/task:{self.placed.worker}"


class Keys:
    """The instance keys of one graph, and what this worker means by them.

    Attributes:
      meaning: {name of what is averaged or broadcast: its dtype and shape}, for comparison with other workers.
    """

    def __init__(self):
        self.meaning: dict[str, str] = {}
        self._taken: set[int] = set()
        self._uses: dict[str, int] = {}
        self._compared, self._lock = 0, threading.Lock()

    @classmethod
    def of(cls, graph: tf.Graph) -> "Keys":
        """Returns the keys of a graph, or of the graph around a function's."""
        while outer := getattr(graph, "outer_graph", None):
            graph = outer
        if not hasattr(graph, _ATTRIBUTE):
            setattr(graph, _ATTRIBUTE, cls())
        return getattr(graph, _ATTRIBUTE)

    def take(self, name: str, count: int = 1) -> int:
        """Returns the first of `count` consecutive keys, which depend on the name and its number of earlier uses."""
        use = self._uses[name] = self._uses.get(name, 0) + 1
        digest = hashlib.sha256(f"{name} {use}".encode()).digest()
        first = _FIRST_KEY + int.from_bytes(digest[:8], "big") % (_END_OF_KEYS - _FIRST_KEY)
        while not self._taken.isdisjoint(range(first, first + count)):
            first += count
        self._taken.update(range(first, first + count))
        return first

    def use(self, name: str) -> int:
        """Returns how often a name was used for keys."""
        return self._uses.get(name, 0)

    def compared(self, workers: Workers) -> tf.Tensor:
        """Returns a tensor that is computed once the workers have compared what they mean, when it is first needed."""
        with tf.device(workers.device + HOST), v1.name_scope("compare_workers"):
            return tf.numpy_function(lambda: self._compare(workers), [], tf.bool)

    def _compare(self, workers: Workers) -> np.bool_:
        with self._lock:
            if self._compared < len(self.meaning):
                workers.compare(self.meaning)
                self._compared = len(self.meaning)
        return np.True_


def described(dtype: tf.DType, shape: tf.TensorShape) -> str:
    """Formats a dtype and a shape for comparison between workers."""
    return f"{dtype.name}{'[?]' if shape.rank is None else shape.as_list()}"


def reduce(tensor: tf.Tensor, workers: Workers, key: int, merge: str = "Add", final: str = "Id") -> tf.Tensor:
    """Returns the sum (merge='Add'), 'Min', 'Max' or product ('Mul') of equal shapes over workers; final='Div': by
    size.

    float16 and bfloat16 are computed in float32 and rounded once.
    """
    dtype = tensor.dtype
    is_half, is_narrow = dtype in (tf.float16, tf.bfloat16), dtype in _NARROW
    if dtype not in _SENT and not is_half and (not is_narrow or dtype == tf.bool):
        raise errors.GraphError(
            f"{tensor.name} is {dtype.name}, which cannot be reduced between workers. Cast it to float32 or int64."
        )
    sent = tf.cast(tensor, tf.float32 if is_half else tf.int32 if is_narrow else dtype)
    with tf.device(HOST):
        reduced = tf.raw_ops.CollectiveReduce(
            input=sent, group_size=workers.size, group_key=_GROUP, instance_key=key, merge_op=merge,
            final_op=final, subdiv_offsets=[0], communication_hint="ring",
        )  # fmt: skip
    return tf.cast(reduced, dtype)


def gather(rows: Sequence[tf.Tensor], workers: Workers, key: int) -> list[tf.Tensor]:
    """Returns the rows of all workers, in their order, of several tensors with equally many.

    Args:
      rows: tensors [n, ...], with any n in each worker; the rest of the shape is the same.
      workers: between which.
      key: the first of 1 + len(rows).

    Returns:
      The tensors [sum of n over workers, ...].
    """
    with tf.device(HOST), v1.name_scope("gather"):
        count = tf.shape(rows[0])[0]
        counts = _gather(count[tf.newaxis], workers, key)
        most = tf.reduce_max(counts)
        is_there = tf.reshape(tf.sequence_mask(counts, most), [-1])
        gathered = []
        for number, own in enumerate(rows, start=1):
            sent = _encoded(own)
            padding = tf.zeros(tf.concat([[most - count], tf.shape(sent)[1:]], axis=0), sent.dtype)
            everything = _gather(tf.concat([sent, padding], axis=0), workers, key + number)
            found = _decoded(tf.boolean_mask(everything, is_there), own.dtype)
            gathered.append(tf.ensure_shape(found, [None, *own.shape[1:]]))
        return gathered


def _gather(rows: tf.Tensor, workers: Workers, key: int) -> tf.Tensor:
    return tf.raw_ops.CollectiveGather(
        input=rows, group_size=workers.size, group_key=_GROUP, instance_key=key, shape=[None, *rows.shape[1:]]
    )


def broadcast(
    value: tf.Tensor | None, dtype: tf.DType, shape: tf.TensorShape, workers: Workers, key: int, root: int
) -> tf.Tensor:  # fmt: skip
    """Returns worker `root`'s value in all workers.

    Args:
      value: in that worker; the others give None.
      dtype, shape: of it, the shape known.
      workers, key: as for reduce.
      root: index of the worker.
    """
    sent = _sent(dtype)
    if not shape.is_fully_defined():
        raise errors.GraphError(f"Only what has a known shape can be broadcast; this one is {shape}.")
    about = dict(group_size=workers.size, group_key=_GROUP, instance_key=key, shape=shape)
    with tf.device(HOST):
        if workers.placed.worker == root:
            return _decoded(tf.raw_ops.CollectiveBcastSend(input=_encoded(value), **about), dtype)
        return _decoded(tf.raw_ops.CollectiveBcastRecv(T=sent, **about), dtype)


def _sent(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which TensorFlow sends values of another."""
    sent = tf.int32 if dtype in _NARROW else _SAME_BITS.get(dtype, dtype)
    if sent not in _SENT:
        raise errors.GraphError(f"{dtype.name} cannot be sent between workers. Send float32 or int64 in its place.")
    return sent


def _encoded(value: tf.Tensor) -> tf.Tensor:
    sent = _sent(value.dtype)
    return tf.bitcast(value, sent) if value.dtype in _SAME_BITS else tf.cast(value, sent)


def _decoded(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(value, dtype) if dtype in _SAME_BITS else tf.cast(value, dtype)
