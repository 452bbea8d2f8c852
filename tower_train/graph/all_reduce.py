"""From what each device has to the mean over all devices, in few large messages."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph.gradients import Gradient

v1 = tf.compat.v1

_DEVICES = 2  # group key of the devices of this process; 1 is that of layers.py
_MESSAGE_BYTES = 4 * 2**20  # of small tensors that travel together; more would make the first of them wait for the last


class AllReduce:
    """Averages what several devices have, so that each of them has the mean, to the bit the same.

    Attributes:
      operations: what a step must run of it on all devices, also where a device has no use for the mean: those that
        take part wait for each other.
    """

    def __init__(self, devices: Sequence[str], kind: str, dtype: tf.DType | None = None):
        """Args: the devices; how: 'collective' (TensorFlow's ring), 'nccl' (NVIDIA's), or 'add_n' (on one device, from
        where the others copy it); the dtype in which gradients are sent, None for their own.

        Raises:
          ConfigError: nccl without GPUs.
        """
        if kind == "nccl" and not all("gpu" in device for device in devices):
            raise errors.ConfigError(
                f"--all_reduce=nccl is for GPUs, but the variables live on {', '.join(devices)}. "
                "Use --all_reduce=collective."
            )
        self._devices, self._kind, self._dtype = devices, kind, dtype
        self.operations: list[tf.Operation] = []

    def mean(self, values: Sequence[Sequence[Gradient]], exactly: bool = False) -> list[list[Gradient]]:
        """The means.

        Args:
          values: over devices, the same number of tensors of static shapes, or of IndexedSlices.
          exactly: send them in their own dtype.

        Returns:
          Over devices, the means in the same order. IndexedSlices stay sparse.
        """
        if len(self._devices) == 1:
            return [list(own) for own in values]
        means = [[None] * len(own) for own in values]
        with v1.name_scope("all_reduce"):
            for members in _messages(values[0]):
                message = [[own[i] for i in members] for own in values]
                reduce = self._sparse if isinstance(message[0][0], tf.IndexedSlices) else self._dense
                for own, found in zip(means, reduce(message, exactly), strict=True):
                    for i, mean in zip(members, found, strict=True):
                        own[i] = mean
        return means

    def _dense(self, message: list[list[tf.Tensor]], exactly: bool) -> list[list[tf.Tensor]]:
        shapes, dtype = [value.shape for value in message[0]], message[0][0].dtype
        sent = dtype if exactly or not self._dtype else self._dtype

        def pack(own):
            return tf.cast(tf.concat([tf.reshape(value, [-1]) for value in own], axis=0), sent)

        def unpack(mean):
            parts = tf.split(tf.cast(mean, dtype), [shape.num_elements() for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        return self._on_each(unpack, self._mean(self._on_each(pack, message)))

    def _mean(self, buffers: list[tf.Tensor]) -> list[tf.Tensor]:
        count = len(buffers)
        if self._kind == "add_n":
            with tf.device(self._devices[len(self.operations) % count]):  # each of them does a part of the work
                mean = tf.add_n(buffers) / count
            self.operations.append(mean.op)
            return self._on_each(tf.identity, [mean] * count)
        # Those of one instance belong together; NCCL needs them to begin in the same order on all devices.
        instance = len(self.operations)
        with tf.control_dependencies(self.operations[-count:] if self._kind == "nccl" else []):
            means = self._on_each(lambda buffer: self._collective_mean(buffer, instance), buffers)
        self.operations += [mean.op for mean in means]
        return means

    def _collective_mean(self, buffer: tf.Tensor, instance: int) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduce(
            input=buffer, group_size=len(self._devices), group_key=_DEVICES, instance_key=instance, merge_op="Add",
            final_op="Div", subdiv_offsets=[0], communication_hint="nccl" if self._kind == "nccl" else "ring",
        )  # fmt: skip

    def _sparse(self, message: list[list[tf.IndexedSlices]], exactly: bool) -> list[list[tf.IndexedSlices]]:
        """All rows of all devices, in the order of the devices."""
        slices = [own[0] for own in message]

        def joined(_):
            values = tf.concat([part.values for part in slices], axis=0)
            indices = tf.concat([part.indices for part in slices], axis=0)
            return [tf.IndexedSlices(values / len(slices), indices, slices[0].dense_shape)]

        return self._on_each(joined, slices)

    def _on_each(self, function: Callable, values: list) -> list:
        results = []
        for device, value in zip(self._devices, values, strict=True):
            with tf.device(device):
                results.append(function(value))
        return results


def _messages(values: Sequence[Gradient]) -> list[list[int]]:
    """Which values travel together, in the order in which the backward pass has them: the last variable's first.

    What is large travels alone, as it need not be copied for it, and what is sparse.
    """
    messages, bytes_together = [], {}
    for i, value in reversed(list(enumerate(values))):
        size = _MESSAGE_BYTES if isinstance(value, tf.IndexedSlices) else value.shape.num_elements() * value.dtype.size
        if size >= _MESSAGE_BYTES // 4:
            messages.append([i])
            continue
        open_message, size_before = bytes_together.get(value.dtype, (None, 0))
        if open_message is None or size_before + size > _MESSAGE_BYTES:
            open_message, size_before = [], 0
            messages.append(open_message)
        open_message.append(i)
        bytes_together[value.dtype] = open_message, size_before + size
    return messages
