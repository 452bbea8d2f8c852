"""Towers compiled by XLA: which operations of a step go into its clusters.

TensorFlow makes clusters of the operations that carry a mark, as few as it can, and leaves out what XLA cannot compile.
An operation that is left out in the middle of a tower splits its cluster.
"""

import contextlib
from collections.abc import Collection, Iterator

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from tower_train.graph import max_pooling

_MARK, _PART = "_XlaCompile", "_XlaScope"  # attributes of operations


def compiled(wanted: bool, device: str, part: str = "step"):
    """Marks the operations of this block, all on one device, for XLA, if wanted. No cluster has operations of two
    devices, or of two parts of a step."""
    graph, stack = tf.compat.v1.get_default_graph(), contextlib.ExitStack()
    if wanted:
        # like tf.xla.experimental.jit_scope, which makes each block a part, and so many small clusters
        marks = {_MARK: AttrValue(b=True), _PART: AttrValue(s=f"{part} {_canonical(device)}".encode())}
        stack.enter_context(graph._attr_scope(marks))
        stack.enter_context(graph.gradient_override_map({"MaxPool": max_pooling.GRADIENT}))
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
