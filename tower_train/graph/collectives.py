"""Collective operations: means, rows and copies of values over towers, devices and workers.

Each process builds its own graph, and collective operations of two graphs meet by two integers: the key of their group
of devices, and their own. Both are hashes of names here, the same in all workers whatever else is in a graph.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import Gradient, variable_name

v1 = tf.compat.v1

MESSAGE_BYTES = 4 * 2**20  # of small tensors that travel together; more would make the first of them wait for the last
# Groups: all towers of all workers; this worker's devices, or with a number that device of each worker; hosts.
_TOWERS, _DEVICES, _HOSTS = "towers", "devices", "hosts"
_LARGEST_KEY = 2**31 - 1
_ATTRIBUTE = "tower_train_keys"  # of a graph
# Types that TensorFlow sends; others travel as one of these that holds all of their values.
_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SENT_AS = {
    tf.bfloat16: tf.float32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
}
_SUMMED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}  # so that a sum is rounded once


def collective_key(name: str) -> int:
    """Returns the key of a group, or of an operation; not hash(), which differs between processes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") & _LARGEST_KEY


class Keys:
    """The keys of one graph's operations, and what this worker means by them."""

    def __init__(self):
        self.meaning: dict[str, str] = {}  # {name of an averaged or broadcast tensor: its dtype and shape}
        self._uses: dict[str, int] = {}
        self._compared, self._lock = 0, threading.Lock()

    @classmethod
    def of(cls, graph: tf.Graph) -> "Keys":
        """Returns the keys of a graph, or of the graph around a function's."""
        while outer := getattr(graph, "outer_graph", None):
            graph = outer
        if not hasattr(graph, _ATTRIBUTE):
            setattr(graph, _ATTRIBUTE, cls())  # kept by the graph, so that they end with it
        return getattr(graph, _ATTRIBUTE)

    def count(self, name: str) -> int:
        """Counts the uses of a name; returns their number."""
        self._uses[name] = self._uses.get(name, 0) + 1
        return self._uses[name]

    def take(self, name: str) -> int:
        """Returns the key of an operation, from its name and the number of earlier ones of that name."""
        return (collective_key(name) + self.count(name)) & _LARGEST_KEY

    def compared(self, compare: Callable[[Mapping[str, str]], None]) -> tf.Tensor:
        """Returns a bool scalar to depend on before operations between workers: computing it calls compare(meaning) if
        names were added since the last call."""

        def up_to_date():
            with self._lock:  # steps of two sessions may run at once
                if self._compared < len(self.meaning):
                    compare(self.meaning)
                    self._compared = len(self.meaning)
            return np.True_

        with tf.device(HOST), v1.name_scope("compare_workers"):
            return tf.numpy_function(up_to_date, [], tf.bool)


def described(dtype: tf.DType, shape: tf.TensorShape) -> str:
    """Formats a dtype and a shape for comparison between workers."""
    return f"{dtype.name}{'[?]' if shape.rank is None else shape.as_list()}"


def mean_over_towers(value: tf.Tensor, num_towers: int, place: str) -> tf.Tensor:
    """Returns the mean of `value` over num_towers towers of all workers. Each calls it once, with the same shape, dtype
    and `place`, a name in the network."""
    return _reduce(value, _TOWERS, num_towers, collective_key(place), hint="auto")


def gather_over_towers(value: tf.Tensor, num_towers: int, place: str) -> tf.Tensor:
    """Returns [num_towers, ...], the values of the towers of all workers at one place; each calls it once."""
    return tf.raw_ops.CollectiveGather(
        input=value[tf.newaxis],
        group_size=num_towers,
        group_key=collective_key(_TOWERS),
        instance_key=collective_key(place),
        shape=[num_towers, *value.shape],
    )


def reduce(tensor: tf.Tensor, size: int, name: str, final: str = "Id") -> tf.Tensor:
    """Adds tensors of equal shapes over `size` workers, by a name that is the same in all of them. final: 'Div' divides
    the sum by `size`; 'Id' does not."""
    sent = _SUMMED_AS.get(tensor.dtype) or _sent(tensor.dtype)
    with tf.device(HOST):
        reduced = _reduce(tf.cast(tensor, sent), _HOSTS, size, _take(name), final)
        return tf.cast(reduced, tensor.dtype)


def gather(rows: Sequence[tf.Tensor], size: int, name: str) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the rows of all `size` workers, in their order, by a name that is the same in all of them.

    Args:
      rows: tensors [n, ...], with any n in each worker; the rest of the shape is the same.

    Returns:
      The tensors [sum of n over workers, ...], and n over workers, int32.
    """

    def gathered(values):
        return tf.raw_ops.CollectiveGather(
            input=values,
            group_size=size,
            group_key=collective_key(_HOSTS),
            instance_key=_take(name),
            shape=[None, *values.shape[1:]],
        )

    with tf.device(HOST), v1.name_scope("gather"):
        count = tf.shape(rows[0])[0]
        counts = gathered(count[tf.newaxis])  # all rows must be padded to one number, which none knows before
        most = tf.reduce_max(counts)
        is_row = tf.reshape(tf.sequence_mask(counts, most), [-1])
        wholes = []
        for values in rows:
            sendable = tf.cast(values, _sent(values.dtype))
            padding = tf.zeros(tf.concat([[most - count], tf.shape(sendable)[1:]], axis=0), sendable.dtype)
            rows_of_all = tf.boolean_mask(gathered(tf.concat([sendable, padding], axis=0)), is_row)
            wholes.append(tf.ensure_shape(tf.cast(rows_of_all, values.dtype), [None, *values.shape[1:]]))
        return wholes, counts


def broadcast(value: tf.Tensor | None, dtype: tf.DType, shape: tf.TensorShape, size: int, name: str) -> tf.Tensor:
    """Returns one worker's value, of this dtype and shape, in all `size` workers; the other workers pass None."""
    sent = _sent(dtype)
    if not shape.is_fully_defined():
        raise errors.GraphError(f"Only what has a known shape can be broadcast; this one is {shape}.")
    arguments = dict(group_size=size, group_key=collective_key(_HOSTS), instance_key=_take(name), shape=shape)
    with tf.device(HOST):
        if value is not None:
            return tf.cast(tf.raw_ops.CollectiveBcastSend(input=tf.cast(value, sent), **arguments), dtype)
        return tf.cast(tf.raw_ops.CollectiveBcastRecv(T=sent, **arguments), dtype)


def broadcast_variables(variables: Sequence[tf.Variable], size: int, is_root: bool, series: str = "") -> tf.Operation:
    """Makes the operation that copies the root's values of variables to all `size` workers, which all must run it."""
    done = []
    with v1.name_scope("broadcast"), tf.device(HOST):
        for variable in variables:
            name = f"{series} broadcast of {variable_name(variable)}"
            arguments = variable.dtype.base_dtype, variable.shape, size, name
            if is_root:
                done.append(broadcast(variable.read_value(), *arguments).op)
            else:
                done.append(variable.assign(broadcast(None, *arguments), read_value=False))
        return tf.group(*done)


class AllReduce:
    """Averages values of several devices, so that all of them get the same mean, to the bit, in few large messages.

    Several workers average on one of their own devices first, and then between those devices of all workers, so that a
    worker's bytes on the network do not grow with its devices.

    Args:
      devices: those of the values.
      kind: 'collective' (TensorFlow's ring), 'nccl' (NVIDIA's), or 'add_n' (on one device; between workers the ring).
      num_workers: each with as many devices.
      weight: of this worker in the means, 1 on average over workers; None if all weigh the same.
      name: separates its messages from those of another AllReduce of the same server.
      dtype: of the values as they are sent; None for their own, or float32 if they have 16 bits.

    Raises:
      ConfigError: nccl without GPUs.
    """

    def __init__(
        self,
        devices: Sequence[str],
        kind: str,
        num_workers: int = 1,
        weight: float | None = None,
        name: str = "all-reduce",
        dtype: tf.DType | None = None,
    ):
        if kind == "nccl" and not all("gpu" in device for device in devices):
            raise errors.ConfigError(
                f"--all_reduce=nccl is for GPUs, but the variables live on {', '.join(devices)}. "
                "Use --all_reduce=collective."
            )
        self._devices, self._kind, self._dtype, self._weight, self._name = devices, kind, dtype, weight, name
        self.num_workers = num_workers
        # each step must run these on all devices, even if a mean is not used: they wait for each other
        self.operations: list[tf.Operation] = []
        self._last_of_nccl: list[tf.Operation] = []

    def mean(self, values: Sequence[Sequence[Gradient]]) -> list[list[Gradient]]:
        """Averages values over all devices: over devices, as many tensors of static shapes, or IndexedSlices, which
        stay sparse. Returns the means in the same order."""
        if len(self._devices) * self.num_workers == 1:
            return [list(local) for local in values]
        means = [[None] * len(local) for local in values]
        with v1.name_scope("all_reduce"):
            for members in _messages(values[0]):
                message = [[local[i] for i in members] for local in values]
                is_sparse = isinstance(message[0][0], tf.IndexedSlices)
                results = self._mean_of_sparse(message) if is_sparse else self._mean_of_dense(message)
                for local, result in zip(means, results, strict=True):
                    for i, mean in zip(members, result, strict=True):
                        local[i] = mean
        return means

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all workers, in their order; on the host."""
        return gather([rows], self.num_workers, f"{self._name} rows")[0][0] if self.num_workers > 1 else rows

    def broadcast(self, variables: Sequence[tf.Variable], worker: int) -> tf.Operation:
        """Copies worker 0's values of variables to all workers; all must run it. worker: this one's index."""
        return broadcast_variables(variables, self.num_workers, worker == 0, self._name)

    def _mean_of_dense(self, message: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        shapes, dtype = [value.shape for value in message[0]], message[0][0].dtype
        # a cast of complex numbers would leave their imaginary parts out in silence
        sent = dtype if dtype.is_complex else self._dtype or _SUMMED_AS.get(dtype, dtype)

        def pack(local):
            whole = tf.concat([tf.reshape(value, [-1]) for value in local], axis=0)
            return tf.cast(self._weighted(whole), sent)

        def unpack(mean):
            parts = tf.split(tf.cast(mean, dtype), [shape.num_elements() for shape in shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        return self._on_each(unpack, self._mean(self._on_each(pack, message)))

    def _mean(self, buffers: list[tf.Tensor]) -> list[tf.Tensor]:
        count = len(buffers)
        if self._kind == "add_n" or self.num_workers > 1:
            adder = len(self.operations) % count  # each device adds every count-th message
            with tf.device(self._devices[adder]):
                mean = tf.add_n(buffers) / count if count > 1 else buffers[0]
            if self.num_workers > 1:
                [mean] = self._mean_on([mean], [self._devices[adder]], f"{_DEVICES} {adder}", self.num_workers)
            self.operations.append(mean.op)
            return self._on_each(tf.identity, [mean] * count)
        means = self._mean_on(buffers, self._devices, _DEVICES, count)
        self.operations += [mean.op for mean in means]
        return means

    def _mean_on(self, buffers: list[tf.Tensor], devices: Sequence[str], group: str, size: int) -> list[tf.Tensor]:
        """Returns the means of one message: equal buffers, one a device, over the `size` members of a group."""
        # NCCL's operations wait for those of the message before: in another order on another device they would wait
        # for ever. Each asks for it, as the session's `collective_nccl` also covers layers', which have no such order.
        is_nccl, key, means = self._kind == "nccl", _take(self._name), []
        for device, buffer in zip(devices, buffers, strict=True):
            with tf.device(device), tf.control_dependencies(self._last_of_nccl):
                means.append(_reduce(buffer, group, size, key, hint="nccl" if is_nccl else "ring"))
        self._last_of_nccl = [mean.op for mean in means] if is_nccl else []
        return means

    def _mean_of_sparse(self, message: list[list[tf.IndexedSlices]]) -> list[list[tf.IndexedSlices]]:
        """Concatenates all rows of all devices, in the order of the workers and of their devices."""
        slices = [local[0] for local in message]
        parts = [[self._weighted(part.values) for part in slices], [part.indices for part in slices]]
        if self.num_workers > 1:
            with tf.device(HOST):
                rows = [tf.concat(part, axis=0) for part in parts]
                gathered, _ = gather(rows, self.num_workers, f"{self._name} rows")
            self.operations += [part.op for part in gathered]
            parts = [[part] for part in gathered]
        count = len(slices) * self.num_workers

        def mean(_):
            values, indices = (tf.concat(part, axis=0) for part in parts)
            return [tf.IndexedSlices(values / count, indices, slices[0].dense_shape)]

        return self._on_each(mean, slices)

    def _weighted(self, values: tf.Tensor) -> tf.Tensor:
        return values if self._weight is None else values * tf.constant(self._weight, values.dtype)

    def _on_each(self, function: Callable, values: Sequence) -> list:
        results = []
        for device, value in zip(self._devices, values, strict=True):
            with tf.device(device):
                results.append(function(value))
        return results


def _messages(values: Sequence[Gradient]) -> list[list[int]]:
    """Groups values that travel together, in the order of the backward pass: the last variable's first."""
    messages, bytes_together = [], {}
    for i, value in reversed(list(enumerate(values))):
        size = MESSAGE_BYTES if isinstance(value, tf.IndexedSlices) else value.shape.num_elements() * value.dtype.size
        if size >= MESSAGE_BYTES // 4:  # large and sparse ones alone, which saves a copy
            messages.append([i])
            continue
        open_message, size_before = bytes_together.get(value.dtype, (None, 0))
        if open_message is None or size_before + size > MESSAGE_BYTES:
            open_message, size_before = [], 0
            messages.append(open_message)
        open_message.append(i)
        bytes_together[value.dtype] = open_message, size_before + size
    return messages


def _take(name: str) -> int:
    return Keys.of(v1.get_default_graph()).take(name)


def _reduce(value: tf.Tensor, group: str, size: int, key: int, final: str = "Div", hint: str = "ring") -> tf.Tensor:
    # Without `timeout_seconds`, which would keep a thread for as long, step after step (BaseCollectiveExecutor). The
    # watchdog and the membership handle a step that hangs.
    return tf.raw_ops.CollectiveReduce(
        input=value,
        group_size=size,
        group_key=collective_key(group),
        instance_key=key,
        merge_op="Add",
        final_op=final,
        subdiv_offsets=[0],
        communication_hint=hint,
    )


def _sent(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which values of another are sent."""
    sent = _SENT_AS.get(dtype, dtype)
    if sent not in _SENT:
        raise errors.GraphError(f"{dtype.name} cannot be sent between workers. Send float32 or int64 instead.")
    return sent
