"""The way of a batch from the host to the network: the place of its distortion, and the time of its crossing."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import kernels

from tower_train import errors
from tower_train.examples import Examples, Tensors
from tower_train.graph.devices import HOST
from tower_train.graph.order import PositionDraws
from tower_train.workload import Workload

_LOOPS = ("While", "StatelessWhile", "Enter")
_OF_GPUS = ("GPU", "DEFAULT")  # device types of kernels


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The way of batches to their devices.

    Attributes:
      devices: over the batches of a step, the device of its tower.
      distorts_there: whether they cross as the examples are, and are preprocessed there; else on the host.
      stages: whether the next step's batches cross during a step.
      end: the position after the run's last example.
      note: a line on the place of preprocessing and its reason, if that is not always so; else None.
    """

    devices: Sequence[str] = ()
    distorts_there: bool = False
    stages: bool = False
    end: int = 0
    note: str | None = None

    @contextlib.contextmanager
    def there(self, tower: int, features: Tensors) -> Iterator[Tensors]:
        """Preprocesses a tower's features on its device within this block."""
        with tf.device(self.devices[tower]), tf.compat.v1.name_scope(f"tower_{tower}/preprocess/"):
            yield tf.nest.map_structure(tf.identity, features)


def stages(devices: Sequence[str]) -> bool:
    """Returns whether batches for these devices travel so far that they should be there when a step begins."""
    return all(map(_is_gpu, devices))


def choose(wanted: str, workload: Workload, examples: Examples, devices: Sequence[str], end: int = 0) -> Transfer:
    """Chooses the way of the batches.

    Args:
      wanted: --distort_on; auto is the device of GPUs that have all kernels for it, unless examples have more bytes
        before it than after, or come in their own order, with checkpoints that hold examples as they cross.
      workload, examples: what is trained.
      devices, end: as in Transfer.

    Raises:
      ConfigError: --distort_on=device, without kernels on GPUs.
    """
    is_staged, is_done = stages(devices), bool(workload.distort or workload.prepare)
    if not all(map(_is_gpu, devices)) or not is_done or wanted == "host":
        return Transfer(devices, is_done and wanted == "device", is_staged, end)
    if examples.elements and wanted == "auto":
        note = "distorts: on the host, as this data set has an order of its own; on the GPUs with --distort_on=device"
        return Transfer(devices, False, is_staged, end, note)
    against, crossing = _against(workload, examples)
    if against and wanted == "device":
        raise errors.ConfigError(
            f"--distort_on=device: {against}. Use --distort_on=host, or other operations in workload {workload.name}."
        )
    note = f"distorts: on the host, as {against}" if against else f"distorts: on the GPUs; examples cross as {crossing}"
    return Transfer(devices, not against, is_staged, end, note)


def preprocess(workload: Workload, features: Tensors, draws: PositionDraws) -> Tensors:
    """Returns features of training examples as the network takes them."""
    if workload.distort:
        return workload.distort(features, draws)
    return workload.prepare(features) if workload.prepare else features


def _against(workload: Workload, examples: Examples) -> tuple[str | None, str]:
    """Returns the reason to preprocess examples on the host, or None; and their form before that."""
    with tf.Graph().as_default() as graph, tf.device(HOST):
        before, _ = examples.symbolic_batch()
        first = tf.constant(0, tf.int64)
        draws = PositionDraws(first, 1, examples.num_examples, 0, bool(examples.open), on_device=True)
        with tf.device("/gpu:0"):
            after = preprocess(workload, tf.nest.map_structure(tf.identity, before), draws)
        lacking = _hindrance(graph.as_graph_def())
    crossing = ", ".join(dict.fromkeys(tensor.dtype.name for tensor in tf.nest.flatten(before)))
    if lacking:
        return lacking, crossing
    sizes = _bytes(before), _bytes(after)
    if None in sizes or sizes[0] > sizes[1]:
        return "it makes examples smaller, or their size is not known", crossing
    return None, crossing


def _hindrance(definition: tf.compat.v1.GraphDef) -> str | None:
    """Returns the first obstacle on GPUs among the operations that are on one, and of the functions that these call."""
    functions = {function.signature.name for function in definition.library.function}
    nodes = [node for node in definition.node if _is_gpu(node.device)]
    reached, left = set(), list(nodes)
    while left:
        node = left.pop()
        called = {name for attr in node.attr.values() for name in _functions_of(attr)} - reached
        reached |= called
        for function in definition.library.function:
            if function.signature.name in called:
                nodes += function.node_def
                left += function.node_def
    for node in nodes:
        if node.op in _LOOPS:
            return "loops, such as tf.map_fn's, are slow on GPUs"
        if node.op not in functions and not any(_allows(kernel, node) for kernel in _kernels(node.op)):
            dtype = node.attr["T"].type or node.attr["Tparams"].type
            of_what = f"{node.op} of {tf.as_dtype(dtype).name}" if dtype else node.op
            return f"GPUs have no kernel for {of_what}"
    return None


def _is_gpu(device: str) -> bool:
    return "gpu" in device.lower()


def _functions_of(attr) -> list[str]:
    return [function.name for function in [attr.func, *attr.list.func] if function.name]


def _kernels(op: str) -> list:
    found = kernels.get_registered_kernels_for_op(op).kernel
    return [kernel for kernel in found if kernel.device_type in _OF_GPUS]


def _allows(kernel, node) -> bool:
    """Returns whether a kernel is for the types of a node."""
    for constraint in kernel.constraint:
        value = node.attr[constraint.name]
        types = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
        if not types <= set(constraint.allowed_values.list.type):
            return False
    return True


def _bytes(tensors: Tensors) -> int | None:
    """Returns the bytes of tensors; None if not static."""
    sizes = [(tensor.shape.num_elements(), tensor.dtype) for tensor in tf.nest.flatten(tensors)]
    if any(count is None or dtype == tf.string for count, dtype in sizes):
        return None
    return sum(count * dtype.size for count, dtype in sizes)
