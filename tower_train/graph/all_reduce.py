"""The all-reduce: the mean over all devices of all workers, in few large messages."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import Gradient

v1 = tf.compat.v1

# Keys of groups of devices: a process's own, the workers' hosts, and the workers' first devices, their second ones, and
# so on. 1 is the key of layers.py.
_DEVICES, _HOSTS, _FIRST_DEVICES = 2, 3, 4
_BROADCASTS = 10**6  # the first instance key of broadcasts, above those of an AllReduce's other operations
TRIAL = 2 * 10**6  # the first of a known mean's
INSTANCES = 3 * 10**6  # keys of an AllReduce with its broadcasts and its trial
# Types that TensorFlow does not broadcast, and types for all their values.
_SENT_AS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.bfloat16: tf.float32,
            **dict.fromkeys([tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32)}  # fmt: skip
MESSAGE_BYTES = 4 * 2**20  # of small tensors that travel together; more would make the first of them wait for the last


class AllReduce:
    """Averages values of several devices, so that all of them get the same mean, to the bit.

    Several workers average on one of their own devices first, and then between those devices of all workers, so that a
    worker's bytes on the network do not grow with its devices.

    Attributes:
      devices, kind, dtype, num_workers, first_instance: as given.
      operations: must run in each step on all devices, even where the mean is not used: they wait for each other.
    """

    def __init__(
        self, devices: Sequence[str], kind: str, dtype: tf.DType | None = None, num_workers: int = 1,
        first_instance: int = 0, weight: float | None = None,
    ):  # fmt: skip
        """Chooses the kind of all-reduce.

        Args:
          devices: those of the values.
          kind: 'collective' (TensorFlow's ring), 'nccl' (NVIDIA's), or 'add_n' (on one device; between workers the
            ring).
          dtype: in which gradients are sent; None for their own.
          num_workers: each with as many devices.
          first_instance: separates its messages from those of another AllReduce of the same session or server.
          weight: of this worker in the means, 1 on average over workers; None if all weigh the same.

        Raises:
          ConfigError: nccl without GPUs, or in bfloat16.
        """
        if kind == "nccl" and not all("gpu" in device for device in devices):
            raise errors.ConfigError(
                f"--all_reduce=nccl is for GPUs, but the variables live on {', '.join(devices)}. "
                "Use --all_reduce=collective."
            )
        if kind == "nccl" and dtype == tf.bfloat16:
            raise errors.ConfigError(
                "--all_reduce_dtype=bfloat16: TensorFlow's NCCL does not send it. Leave the option out, or use "
                "--all_reduce=collective."
            )
        self.devices, self.kind, self.dtype, self.num_workers = devices, kind, dtype, num_workers
        self.first_instance, self._weight = first_instance, weight
        self.operations: list[tf.Operation] = []
        self._last_of_nccl: list[tf.Operation] = []

    def mean(self, values: Sequence[Sequence[Gradient]], exactly: bool = False) -> list[list[Gradient]]:
        """Averages values over all devices.

        Args:
          values: over devices, the same number of tensors of static shapes, or of IndexedSlices.
          exactly: send them in their own dtype.

        Returns:
          Over devices, the means in the same order. IndexedSlices stay sparse.
        """
        if len(self.devices) * self.num_workers == 1:
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
        sent = dtype if exactly or not self.dtype else self.dtype

        def pack(own):
            return tf.cast(self._weighted(tf.concat([tf.reshape(value, [-1]) for value in own], axis=0)), sent)

        def unpack(mean):
            parts = tf.split(tf.cast(mean, dtype), [shape.num_elements() for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        return self._on_each(unpack, self._mean(self._on_each(pack, message)))

    def _mean(self, buffers: list[tf.Tensor]) -> list[tf.Tensor]:
        count = len(buffers)
        if self.kind == "add_n" or self.num_workers > 1:
            turn = len(self.operations) % count  # the devices take turns
            with tf.device(self.devices[turn]):
                mean = tf.add_n(buffers) / count if count > 1 else buffers[0]
                if self.num_workers > 1:
                    instance, group = self._next_instance(), _FIRST_DEVICES + turn
                    [mean] = self._collective_means([mean], [self.devices[turn]], instance, self.num_workers, group)
            self.operations.append(mean.op)
            return self._on_each(tf.identity, [mean] * count)
        instance = self._next_instance()  # operations of one instance belong together
        means = self._collective_means(buffers, self.devices, instance, count, _DEVICES)
        self.operations += [mean.op for mean in means]
        return means

    def _collective_means(
        self, buffers: list[tf.Tensor], devices: Sequence[str], instance: int, size: int, group: int
    ) -> list[tf.Tensor]:
        """Returns the means of one message on these devices.

        NCCL's operations wait for those of the message before: in another order on another device they would wait for
        ever. They are requested one by one, since the session's `collective_nccl` also covers those of layers, which
        have no such order. None has a `timeout_seconds`, which would keep a thread for as long, step after step
        (BaseCollectiveExecutor). The watchdog and the membership handle a step that hangs.
        """
        means = []
        for device, buffer in zip(devices, buffers, strict=True):
            with tf.device(device), tf.control_dependencies(self._last_of_nccl):
                means.append(tf.raw_ops.CollectiveReduce(
                    input=buffer, group_size=size, group_key=group, instance_key=instance, merge_op="Add",
                    final_op="Div", subdiv_offsets=[0], communication_hint="nccl" if self.kind == "nccl" else "ring",
                ))  # fmt: skip
        if self.kind == "nccl":
            self._last_of_nccl = [mean.op for mean in means]
        return means

    def _weighted(self, values: tf.Tensor) -> tf.Tensor:
        return values if self._weight is None else values * tf.constant(self._weight, values.dtype)

    def _next_instance(self) -> int:
        return self.first_instance + len(self.operations)

    def _sparse(self, message: list[list[tf.IndexedSlices]], exactly: bool) -> list[list[tf.IndexedSlices]]:
        """Joins all rows of all devices, in the order of the workers and of their devices."""
        slices = [own[0] for own in message]
        parts = [[self._weighted(part.values) for part in slices], [part.indices for part in slices]]
        count = len(slices) * self.num_workers
        if self.num_workers > 1:
            with tf.device(HOST):
                parts = [[part] for part in self._gather_rows([tf.concat(part, axis=0) for part in parts])]

        def joined(_):
            values, indices = (tf.concat(part, axis=0) for part in parts)
            return [tf.IndexedSlices(values / count, indices, slices[0].dense_shape)]

        return self._on_each(joined, slices)

    def _gather_rows(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the rows of all workers; if their number is not static, it may differ between workers.

        Args:
          parts: tensors of equally many rows.
        """
        if parts[0].shape[0] is not None and self._weight is None:
            return [self.gather(part) for part in parts]
        count = tf.shape(parts[0])[:1]
        counts = self.gather(tf.ensure_shape(count, [1]))
        most = tf.reduce_max(counts)
        is_row = tf.reshape(tf.sequence_mask(counts, most), [-1])

        def gather(part):
            rest = [[0, 0]] * (part.shape.rank - 1)
            return tf.boolean_mask(self.gather(tf.pad(part, [[0, most - count[0]], *rest])), is_row)

        return [gather(part) for part in parts]

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all workers, in their order, equally many from each. To be called on the host.

        Args:
          rows: [n, ...].

        Returns:
          [workers * n, ...].
        """
        if self.num_workers == 1:
            return rows
        gathered = tf.raw_ops.CollectiveGather(
            input=rows, group_size=self.num_workers, group_key=_HOSTS, instance_key=self._next_instance(),
            shape=[],  # the kernel takes the rows' shape
        )  # fmt: skip
        self.operations.append(gathered.op)
        return gathered

    def broadcast(self, variables: Sequence[tf.Variable], worker: int) -> tf.Operation:
        """Copies worker 0's values of variables to all workers, all of which must run it. worker: this one's index."""
        done = []
        with v1.name_scope("broadcast"):
            for number, variable in enumerate(variables):
                instance = self.first_instance + _BROADCASTS + number
                about = {"group_size": self.num_workers, "group_key": _HOSTS, "instance_key": instance}
                shape, dtype = variable.shape, variable.dtype.base_dtype
                sent_as = _SENT_AS.get(dtype, dtype)
                convert = tf.bitcast if sent_as.size == dtype.size else tf.cast
                with tf.device(HOST):
                    if worker == 0:
                        value = variable.read_value()
                        value = value if sent_as == dtype else convert(value, sent_as)
                        done.append(tf.raw_ops.CollectiveBcastSend(input=value, shape=shape, **about).op)
                    else:
                        value = tf.raw_ops.CollectiveBcastRecv(T=sent_as, shape=shape, **about)
                        value = value if sent_as == dtype else convert(value, dtype)
                        done.append(variable.assign(value, read_value=False))
            return tf.group(*done)

    def _on_each(self, function: Callable, values: list) -> list:
        results = []
        for device, value in zip(self.devices, values, strict=True):
            with tf.device(device):
                results.append(function(value))
        return results


def _messages(values: Sequence[Gradient]) -> list[list[int]]:
    """Groups values that travel together, in the order of the backward pass: the last variable's first.

    Large and sparse values travel alone, which saves a copy of large ones.
    """
    messages, bytes_together = [], {}
    for i, value in reversed(list(enumerate(values))):
        size = MESSAGE_BYTES if isinstance(value, tf.IndexedSlices) else value.shape.num_elements() * value.dtype.size
        if size >= MESSAGE_BYTES // 4:
            messages.append([i])
            continue
        open_message, size_before = bytes_together.get(value.dtype, (None, 0))
        if open_message is None or size_before + size > MESSAGE_BYTES:
            open_message, size_before = [], 0
            messages.append(open_message)
        open_message.append(i)
        bytes_together[value.dtype] = open_message, size_before + size
    return messages
