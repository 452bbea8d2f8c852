"""The next step's batches on the towers' devices during a step.

A step trains on the batches that the previous step left there, and leaves the next ones, which cross while it computes.
The first ones come when the stream begins, at the run's position, so batches that lay there untrained are read again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tower_train.examples import Tensors
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

Batches = list[tuple[Tensors, Tensors]]  # over towers, (features, labels)
NEXT = "next_batch"  # the operation that fetches the next step's batches
_NONE = -1  # the position of no batch
_ON_HOST = (tf.string, tf.variant, tf.resource)


@dataclasses.dataclass(frozen=True)
class Source:
    """An initializable iterator of a data set's batches.

    Attributes:
      iterator: the iterator.
      divided: its elements -> a step's batches.
      length: int64 scalar, the elements of the whole data set; None for examples fetched by index.
      order: digest of the order that workers have in common; empty if they need none.
    """

    iterator: Any
    divided: Callable[[Any], Batches]
    length: tf.Tensor | None = None
    order: str = ""

    def take(self) -> Batches:
        """Makes the ops that take a step's batches out of the iterator."""
        return self.divided(self.iterator.get_next())


@dataclasses.dataclass(frozen=True)
class Staged:
    """Batches that wait on their devices.

    Attributes:
      batches: those of the current step.
      fill: op that starts the iterator and puts the first ones there; run it after variables hold their values.
      renewal: ops that put the next step's there, which each step has to run.
      waiting: bool scalar, whether some wait, always except after the last step of a run.
      put: (batches on the host) -> op that puts these there for the next step.
    """

    batches: Batches
    fill: tf.Operation
    renewal: Sequence[tf.Operation]
    waiting: tf.Tensor
    put: Callable[[Batches], tf.Operation]


def stage(source: Source, devices: Sequence[str], start: tf.Tensor, step_size: int, end: int) -> Staged:
    """Stages an iterator's batches.

    Args:
      source: the iterator.
      devices: over towers, of their batches.
      start: int64 scalar, the position of a step's first example.
      step_size: examples per step.
      end: the position after the run's last example, from which on nothing is taken, so that no unneeded example fails.
    """
    with tf.control_dependencies([source.iterator.initializer, v1.tables_initializer()]):
        first = source.take()
    position = _Place("staged/position", tf.identity(start), HOST)
    places = tf.nest.map_structure(_Place, _names(first), first, _on(devices, first))

    def put(batches: Batches) -> tf.Operation:
        puts = tf.nest.map_structure(lambda place, tensor: place.put(tensor), places, batches)
        return tf.group(position.put(tf.identity(start)), *tf.nest.flatten(puts))

    batches = tf.nest.map_structure(lambda place: place.get(), places)
    held = position.get()
    in_step = tf.debugging.assert_equal(held, start, "the batches on the devices are not those of this step")
    with tf.control_dependencies([in_step]):
        following = start + step_size
    is_wanted = following < end
    following = tf.where(is_wanted, following, tf.constant(_NONE, tf.int64))
    coming = tf.cond(is_wanted, source.take, lambda: tf.nest.map_structure(_like, first), name=NEXT)
    renewal = [position.put(following)]
    for place, tensor, now in zip(*map(tf.nest.flatten, (places, coming, batches)), strict=True):
        renewal.append(place.put(tensor, [now.op]))
    return Staged(batches, put(first), renewal, tf.not_equal(held, _NONE), put)


class _Place:
    """A tensor's place on a device between two steps: a variable outside of the run's state."""

    def __init__(self, name: str, like: tf.Tensor, device: str):
        self._dtype, self._shape = like.dtype, like.shape
        self._device = HOST if like.dtype in _ON_HOST else device
        # GPUs have no int32 variables, but can bitcast them to float32.
        self._kept_dtype = tf.float32 if like.dtype == tf.int32 else like.dtype
        with tf.device(self._device):
            self._handle = tf.raw_ops.VarHandleOp(dtype=self._kept_dtype, shape=like.shape, shared_name=name, name=name)

    def put(self, tensor: tf.Tensor, after: Sequence[tf.Operation] = ()) -> tf.Operation:
        """Puts a tensor there, after some ops on this device."""
        if self._kept_dtype != self._dtype:
            tensor = tf.bitcast(tensor, self._kept_dtype)
        with tf.device(self._device), tf.control_dependencies(after):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=tensor)

    def get(self) -> tf.Tensor:
        with tf.device(self._device):
            value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._kept_dtype)
            if self._kept_dtype != self._dtype:
                value = tf.bitcast(value, self._dtype)
        value.set_shape(self._shape)
        return value


def _names(batches: Batches) -> Batches:
    count = len(tf.nest.flatten(batches))
    return tf.nest.pack_sequence_as(batches, [f"staged/part_{i}" for i in range(count)])


def _on(devices: Sequence[str], batches: Batches) -> Batches:
    return [
        tf.nest.map_structure(lambda _, device=device: device, batch)
        for device, batch in zip(devices, batches, strict=True)
    ]


def _like(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a placeholder value of this shape and type."""
    return tf.zeros([size or 0 for size in tensor.shape], tensor.dtype)
