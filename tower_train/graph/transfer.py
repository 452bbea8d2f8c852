"""The transfer of a batch from the host to its tower's device: where it is augmented, and when it crosses.

Batches for GPUs are staged: a step trains on those that the previous step left there, and leaves the next ones, which
cross while it computes. The first ones come when the stream begins, at the run's position, so batches that lay there
untrained are read again.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.examples import Examples, Tensors
from tower_train.graph.devices import HOST
from tower_train.graph.layout import Layout
from tower_train.workload import Workload

v1 = tf.compat.v1

Batches = list[tuple[Tensors, Tensors]]  # over towers, (features, labels)
NEXT = "next_batch"  # the operation that fetches the next step's batches
_NONE = -1  # the position of no batch
_ON_HOST = (tf.string, tf.variant, tf.resource)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The transfer of batches to their devices."""

    augments_on_devices: bool = False  # preprocessed there, after they crossed; else on the host
    is_staged: bool = False  # the next step's batches cross during a step
    end: int = 0  # the position after the run's last example
    is_compiled: bool = False  # XLA compiles the preprocessing on devices
    note: str | None = None  # for the log


TO_HOST = Transfer()


def choose_transfer(
    augment_on: str, workload: Workload, examples: Examples, devices: Sequence[str], end: int, is_compiled: bool
) -> Transfer:
    """Chooses how the batches get to their devices. augment_on: the option; end, is_compiled: as in Transfer."""
    on_gpus, there, note = are_gpus(devices), False, None
    # Examples in an order of their own would be lost if they were fetched ahead of their step.
    is_staged = on_gpus and not examples.elements
    if workload.augment or workload.prepare or workload.mix:
        # auto: not for these either, since checkpoints hold some of them as they cross
        there = augment_on == "device" or (augment_on == "auto" and is_staged and workload.augments_on_devices)
        note = f"augments: on the {'GPUs' if there else 'host'} (--augment_on={augment_on})" if on_gpus else None
    return Transfer(there, is_staged, end, is_compiled, note)


def are_gpus(devices: Sequence[str]) -> bool:
    """Returns whether the way to these devices is so long that batches should be there when a step begins."""
    return all("gpu" in device.lower() for device in devices)


def stage_batches(
    take: Callable[[], Batches],
    on_devices: Callable[[Batches, tf.Tensor], Batches],
    begin: tf.Operation,
    layout: Layout,
    examples_seen: tf.Tensor,
    end: int,
) -> tuple[Batches, tf.Operation, list[tf.Operation]]:
    """Stages an iterator's batches.

    Args:
      take: makes the ops that take a step's batches out of the iterator.
      on_devices: (a step's batches, its position) -> the same as the towers take them.
      begin: op that starts the iterator.
      layout: of a step; its towers take the batches.
      examples_seen: int64 scalar, the position of a step's first example.
      end: as in Transfer.

    Returns:
      The current step's batches; an op that starts the iterator and puts the first ones there, to be run after
        variables hold their values; ops that put the next step's there, which each step has to run.
    """
    with tf.control_dependencies([begin, v1.tables_initializer()]):
        taken = take()
        first = on_devices(taken, examples_seen)
    flat_first = tf.nest.flatten(first)
    devices = [tower.device for tower, batch in zip(layout.towers, first, strict=True) for _ in tf.nest.flatten(batch)]
    # to notice batches of another step, as after a restore
    position = _StagedTensor("staged/position", examples_seen, HOST)
    places = [_StagedTensor(f"staged/part_{i}", *of) for i, of in enumerate(zip(flat_first, devices, strict=True))]
    fill = [position.put(examples_seen), *(place.put(tensor) for place, tensor in zip(places, flat_first, strict=True))]

    batches = [place.get() for place in places]
    in_step = tf.debugging.assert_equal(
        position.get(), examples_seen, "the batches on the devices are not those of this step"
    )
    with tf.control_dependencies([in_step]):
        following = examples_seen + layout.global_batch
    is_wanted = following < end  # no step needs later examples, so none of those may fail the run

    def no_batches() -> Batches:
        return tf.nest.map_structure(lambda like: tf.zeros([size or 0 for size in like.shape], like.dtype), taken)

    # preprocessed in the step before too, so that a step's first operation finds all of it on the device
    coming = on_devices(tf.cond(is_wanted, take, no_batches, name=NEXT), following)
    renewal = [position.put(tf.where(is_wanted, following, tf.constant(_NONE, tf.int64)))]
    for place, tensor, now in zip(places, tf.nest.flatten(coming), batches, strict=True):
        renewal.append(place.put(tensor, [now.op]))
    return list(tf.nest.pack_sequence_as(first, batches)), tf.group(*fill), renewal


class _StagedTensor:
    """A tensor's place on a device between two steps: a variable outside of the run's state."""

    def __init__(self, name: str, like: tf.Tensor, device: str):
        self._dtype, self._shape = like.dtype, like.shape
        self._device = HOST if like.dtype in _ON_HOST else device
        # GPUs have no int32 variables, but can bitcast them to float32.
        self._kept_dtype = tf.float32 if like.dtype == tf.int32 else like.dtype
        with tf.device(self._device):
            # raw, as tf.Variable would join collections, and so checkpoints
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
