"""Batch normalisation that is not the trainer's, over all towers: by tf.nn.moments and fused operations.

Each tower normalises by its own examples, by design. To compare everything else, these functions are replaced while
the graphs of the comparison are built.
"""

import contextlib
import functools
import sys
import unittest.mock
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.ops import nn_impl

from tower_train.graph import context
from tower_train.normalization import mean_over_towers

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "tf_slim")


def first_in(graph: tf.Graph, batch: int | None = None) -> tf.Operation | None:
    """Returns the first operation of tower 0 that may compute moments over its batch, of this size if it is known."""
    of_tower = (op for op in graph.get_operations() if op.name.startswith("tower_0/"))
    return next((op for op in of_tower if is_over_batch(op, batch)), None)


def is_over_batch(op: tf.Operation, batch: int | None = None) -> bool:
    """Returns whether an operation computes moments over its batch, of this size if it is known."""
    if op.type.startswith("FusedBatchNorm") and "Grad" not in op.type:  # of layer normalisation, rows are elsewhere
        return op.get_attr("is_training") and (op.inputs[0].shape[0] != 1 or batch == 1)
    if op.type != "SquaredDifference" or op.inputs[1].op.type != "StopGradient":
        return False
    mean = op.inputs[1].op.inputs[0].op
    axes = tf.get_static_value(mean.inputs[1]) if mean.type == "Mean" else None
    return axes is not None and 0 in axes.reshape(-1)


@contextlib.contextmanager
def over_all_towers(towers: int) -> Iterator[None]:
    """Lets these functions compute over the batches of so many towers within this block."""
    replacements = {
        nn_impl.moments: functools.partial(_moments, towers, nn_impl.moments),
        nn_impl.fused_batch_norm: functools.partial(_fused_batch_norm, towers, nn_impl.fused_batch_norm),
    }
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in _LIBRARIES]
    with contextlib.ExitStack() as stack:
        for module in modules:  # each has them under its own names
            for name, value in list(vars(module).items()):
                if callable(value) and value.__hash__ and value in replacements:
                    stack.enter_context(unittest.mock.patch.object(module, name, replacements[value]))
        yield


def _moments(towers: int, plain: Callable, x, axes, shift=None, name=None, keep_dims=None, keepdims=None):
    axes = [axis % x.shape.rank for axis in (axes if isinstance(axes, list | tuple) else [axes])]
    if 0 not in axes or context.current().statistics is None:
        return plain(x, axes, shift=shift, name=name, keep_dims=keep_dims, keepdims=keepdims)
    mean = mean_over_towers(tf.reduce_mean(x, axes, keepdims=True), towers)
    variance = mean_over_towers(tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=True), towers)
    return (mean, variance) if keep_dims or keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _fused_batch_norm(
    towers: int, plain: Callable, x, scale, offset, mean=None, variance=None, epsilon=0.001, data_format="NHWC",
    is_training=True, name=None, exponential_avg_factor=1.0,
):  # fmt: skip
    is_of_tower = context.current().statistics is not None and x.shape[0] != 1
    if not is_training or not is_of_tower or exponential_avg_factor not in (None, 1.0):
        return plain(x, scale, offset, mean, variance, epsilon, data_format, is_training, name, exponential_avg_factor)
    axis = 1 if data_format.startswith("NC") else x.shape.rank - 1
    axes = [each for each in range(x.shape.rank) if each != axis]
    shape = [-1 if each == axis else 1 for each in range(x.shape.rank)]
    mean, variance = _moments(towers, nn_impl.moments, x, axes)
    count = towers * tf.cast(tf.size(x) // x.shape[axis], variance.dtype)
    rows = (tf.reshape(each, shape) for each in (mean, variance, offset, scale))
    outputs = tf.nn.batch_normalization(x, *rows, epsilon)
    return outputs, mean, variance * (count / tf.maximum(count - 1, 1))
