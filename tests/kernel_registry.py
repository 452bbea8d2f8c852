"""Kernels for GPUs, by the registry of TensorFlow's wheel, which holds CUDA's too, also where there is no GPU."""

import functools

import tensorflow as tf
from tensorflow.python.framework import kernels

# Soft placement puts these on the CPU: {(op, dtype): why}.
EXCEPTIONS = {("SparseSoftmaxCrossEntropyWithLogits", "float64"): "no network is trained in float64 for its speed"}


@functools.cache
def registered(op):
    return [kernel for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT")]  # fmt: skip


def kernel_of(node):
    """The first of a node's kernels for GPUs; None if there is none."""
    fitting = (k for k in registered(node.op) if all(allows(constraint, node) for constraint in k.constraint))
    return next(fitting, None)


def allows(constraint, node):
    value = node.attr[constraint.name]
    found = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
    return found <= set(constraint.allowed_values.list.type)


def nodes_on_gpus(definition):
    """The operations of a GraphDef that it puts on GPUs, those within functions included."""
    functions = {function.signature.name for function in definition.library.function}
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [node for node in nodes if "GPU" in node.device and node.op not in functions]


def lacking(nodes):
    """{(op, dtype)} of those that have no kernel on a GPU; the dtype of operations without one is empty."""
    without = (node for node in nodes if kernel_of(node) is None)
    return {(node.op, tf.as_dtype(node.attr["T"].type).name if "T" in node.attr else "") for node in without}
