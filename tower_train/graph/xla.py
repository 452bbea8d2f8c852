"""Towers compiled by XLA: which operations of a step go into its clusters.

TensorFlow makes clusters of the operations that carry a mark, as few as it can, and leaves out what XLA cannot compile.
An operation that is left out in the middle of a tower splits its cluster.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

_MARK, _PART = "_XlaCompile", "_XlaScope"  # attributes of operations
_MAX_POOL_GRADIENT = "TowerTrainMaxPool"  # its name for tf.Graph.gradient_override_map
_LARGEST_WINDOW = 25  # pixels, each of which takes some operations


def compiled(wanted: bool, device: str, part: str = "step"):
    """Marks the operations of this block, all on one device, for XLA, if wanted. No cluster has operations of two
    devices, or of two parts of a step."""
    graph, stack = tf.compat.v1.get_default_graph(), contextlib.ExitStack()
    if wanted:
        # like tf.xla.experimental.jit_scope, which makes each block a part, and so many small clusters
        marks = {_MARK: AttrValue(b=True), _PART: AttrValue(s=f"{part} {_canonical(device)}".encode())}
        stack.enter_context(graph._attr_scope(marks))
        stack.enter_context(graph.gradient_override_map({"MaxPool": _MAX_POOL_GRADIENT}))
    return stack


@contextlib.contextmanager
def compiled_where_placed(devices: Collection[str], part: str) -> Iterator[None]:
    """Marks this block's operations on floating-point numbers for XLA: a part of the step on each of these devices.
    Reads and assignments stay outside, which copy nothing and would split programs."""
    graph, wanted = tf.compat.v1.get_default_graph(), {_canonical(device) for device in devices}
    before = len(graph.get_operations()) if wanted else 0
    yield
    for op in reversed(graph.get_operations()[before:] if wanted else []):
        if not op.outputs or not op.outputs[0].dtype.is_floating or any(i.dtype == tf.resource for i in op.inputs):
            continue
        if op.type == "Const":  # beside what takes it, else it would cross in each step
            op._set_device(next((each.device for each in op.outputs[0].consumers()), op.device))
        if (device := _canonical(op.device)) in wanted:
            op._set_attr(_MARK, AttrValue(b=True))
            op._set_attr(_PART, AttrValue(s=f"{part} {device}".encode()))


def not_compiled():
    """Keeps the operations of this block out of clusters, as XLA draws other random numbers."""
    return tf.compat.v1.get_default_graph()._attr_scope({_MARK: AttrValue(b=False)})


def prepare(graph: tf.Graph, session_config: tf.compat.v1.ConfigProto) -> None:
    """Prepares a finished graph, and the sessions that will run it, for XLA."""
    leave_out_other_devices(graph)
    leave_to_xla(session_config)


def leave_out_other_devices(graph: tf.Graph) -> None:
    """Unmarks operations made in a block of another device, such as reads of a variable on the host."""
    for op in graph.get_operations():
        if op.node_def.attr[_MARK].b and not op.node_def.attr[_PART].s.decode().endswith(f" {_canonical(op.device)}"):
            op._set_attr(_MARK, AttrValue(b=False))


def _canonical(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)  # less its job and task, which all devices of a process share
    return tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index).to_string()


def leave_to_xla(session_config: tf.compat.v1.ConfigProto) -> None:
    """Turns off those of TensorFlow's rewrites that XLA does better."""
    # their new operations carry no mark, or cannot be compiled, and so split clusters
    rewrites = session_config.graph_options.rewrite_options
    for name in ("remapping", "layout_optimizer", "arithmetic_optimization"):
        setattr(rewrites, name, rewrites.OFF)
    if session_config.device_count.get("CPU", 0) < 2:  # else it folds for XLA, on the first of the CPUs, and then fails
        rewrites.constant_folding = rewrites.OFF


@tf.RegisterGradient(_MAX_POOL_GRADIENT)
def _max_pool_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of a max pooling: of equal greatest values the first has it, by rows, as on CPUs. XLA's own
    operation, select-and-scatter, which large windows still get, takes longer and gives it to another of them."""
    maps, pooled = op.inputs[0], op.outputs[0]
    known = {name: op.get_attr(name) for name in ("ksize", "strides", "padding", "data_format")}
    (_, height, width, _), (_, down, right, _) = known["ksize"], known["strides"]
    is_of_images = known["ksize"][::3] == known["strides"][::3] == [1, 1] and known["data_format"] == b"NHWC"
    if not is_of_images or known["padding"] == b"EXPLICIT" or height * width > _LARGEST_WINDOW:
        known |= {"explicit_paddings": op.get_attr("explicit_paddings")}
        return tf.raw_ops.MaxPoolGrad(orig_input=maps, orig_output=pooled, grad=upstream, **known)
    batch, rows, columns, channels = tf.unstack(tf.shape(pooled))
    to_last = tf.stack([(rows - 1) * down, (columns - 1) * right])  # from the first window to the last
    missing = to_last + [height, width] - tf.shape(maps)[1:3]  # less than 0: pixels that no window has
    before = tf.maximum(missing, 0) // 2
    around = tf.stack([before, tf.maximum(missing, 0) - before], 1)
    padded = tf.pad(maps, _of_pixels(around), constant_values=tf.constant(-math.inf, maps.dtype))
    places = list(itertools.product(range(height), range(width)))  # in a window

    def at(row: int, column: int) -> tf.Tensor:  # that value of each window
        return padded[:, row : row + to_last[0] + 1 : down, column : column + to_last[1] + 1 : right]

    greatest, first = at(0, 0), tf.zeros(tf.shape(pooled), tf.int32)
    for number, place in enumerate(places[1:], 1):
        is_greater = at(*place) > greatest
        greatest, first = tf.where(is_greater, at(*place), greatest), tf.where(is_greater, number, first)

    def spread(number: int, place: tuple[int, int]) -> tf.Tensor:  # over the pixels that windows cover
        part = tf.where(tf.equal(first, number), upstream, tf.zeros([], upstream.dtype))
        part = tf.reshape(part, [batch, rows, 1, columns, 1, channels])
        part = tf.pad(part, [[0, 0], [0, 0], [0, down - 1], [0, 0], [0, right - 1], [0, 0]])
        part = tf.reshape(part, [batch, rows * down, columns * right, channels])
        after = [height - 1 - place[0], width - 1 - place[1]]
        return tf.pad(part[:, : to_last[0] + 1, : to_last[1] + 1], _of_pixels(tf.stack([place, after], 1)))

    gradient = tf.pad(
        tf.add_n([spread(number, place) for number, place in enumerate(places)]),
        _of_pixels(tf.stack([[0, 0], tf.maximum(-missing, 0)], 1)),
    )
    last = before + tf.shape(maps)[1:3]
    return tf.ensure_shape(gradient[:, before[0] : last[0], before[1] : last[1]], maps.shape)


def _of_pixels(paddings: tf.Tensor) -> tf.Tensor:
    """Returns the paddings of images, from those of their rows and columns [2, 2]."""
    return tf.concat([[[0, 0]], paddings, [[0, 0]]], 0)
