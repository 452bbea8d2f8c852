"""The axis of a tensor along which a tower's examples lie, found from the operations between the batch and the tensor.

Sizes alone do not tell: a sequence may be as long as the batch.
"""

from typing import NamedTuple

import tensorflow as tf

v1 = tf.compat.v1


class Axis(NamedTuple):
    """An axis of examples."""

    number: int = 0
    rows: int = 1  # before each example's: those of one after the other if [time, batch, ...] is [time * batch, ...]


Axes = dict[str, Axis | None]  # {a tensor's name: its axis of examples}

_REARRANGING = frozenset(  # axes, also if the result has as many
    "All Any BatchMatMulV2 BatchMatMulV3 ConjugateTranspose Einsum EuclideanNorm Gather GatherNd GatherV2 MatMul Max "
    "Mean Min Prod StridedSlice Sum Transpose".split()
)
# Of a list the axis is its elements', -1 if each is an example; what loops return has the axis of what they are given.
_OF_LISTS = {"TensorListFromTensor": -1, "TensorListStack": 1} | dict.fromkeys(
    "Identity StatelessWhile TensorListGetItem While".split(), 0
)
_MARK = 1_000_003  # a size that no other axis has
_WHOLE = v1.AttrValue(i=-1)  # all bits of a slice's mask: it begins at the first place, and ends at the last


def batch_axis(tensor: tf.Tensor, batch: int | None, known: Axes) -> int | None:
    """Returns the axis of the tower's examples, also if each has several rows; None if no axis holds the whole batch.

    batch: number of examples, if known; known: the axes of the tower's input, to which those that are found are added.
    """
    stack, path = [tensor], set()
    while stack:  # depth first; not recursive, as networks are deep
        each = stack[-1]
        inputs = () if each.name in known else each.op.inputs
        if waiting := [i for i in inputs if i.name not in known and i.name not in path]:  # TensorFlow 1's loops return
            path.add(each.name)
            stack += waiting
        elif stack.pop().name not in known:
            axis = _axis(each, known)
            size = each.shape[axis.number] if axis and each.shape.rank else None
            # a multiple of the batch is several rows an example; any other size is another axis
            known[each.name] = None if batch and size is not None and size % batch else axis
    axis = known[tensor.name]
    return axis and axis.number


def _axis(tensor: tf.Tensor, known: Axes) -> Axis | None:
    """Returns the axis, given the axes of the operation's inputs."""
    op, rank = tensor.op, tensor.shape.rank
    if op.type in _OF_LISTS:
        axes = {known[each.name] for each in op.inputs if known.get(each.name)}
        axis = axes.pop() if len(axes) == 1 else Axis(-2)
        axis = axis._replace(number=axis.number + _OF_LISTS[op.type])
        return axis if tensor.dtype == tf.variant or 0 <= axis.number < (rank or 0) else None
    of_examples = [each for each in op.inputs if known.get(each.name) and each.shape.rank]
    if not of_examples or rank is None:
        return None
    source = max(of_examples, key=lambda each: each.shape.rank)  # the others are broadcast to it
    axis = known[source.name]
    if op.type == "Reshape":
        return _reshaped(source.shape, tensor.shape, axis)
    if op.type == "BroadcastTo":
        return axis._replace(number=axis.number + rank - source.shape.rank)
    # of a variable the rows are looked up; they have further axes behind those of their indices
    if op.type == "ResourceGather" or (rank == source.shape.rank and op.type not in _REARRANGING):
        return axis
    number = _inferred(tensor, known, source.shape[axis.number])
    return None if number is None else axis._replace(number=number)


def _inferred(tensor: tf.Tensor, known: Axes, batch: int | None) -> int | None:
    """Returns the axis which has a size of _MARK, as TensorFlow infers it, if the inputs' axes of examples have it, and
    not `batch`."""
    op, attributes = tensor.op, dict(tensor.op.node_def.attr)
    if op.type == "StridedSlice":  # only some examples: batch_axis compares the sizes
        attributes |= {"begin_mask": _WHOLE, "end_mask": _WHOLE}
    with tf.Graph().as_default() as scratch:
        inputs = []
        for each in op.inputs:
            axis, rank, value = known.get(each.name), each.shape.rank, None
            sizes = None if rank is None else each.shape.as_list()
            if axis and rank:
                sizes[axis.number] = _MARK
            elif rank:  # there may be as many weights
                sizes = [None if size == batch else size for size in sizes]
            if not axis and rank in (0, 1):  # numbers of axes, and the like
                value = tf.get_static_value(each)
            inputs.append(v1.placeholder(each.dtype, sizes) if value is None else tf.constant(value))
        try:
            inferred = scratch.create_op(op.type, inputs, [each.dtype for each in op.outputs], attrs=attributes)
        except (ValueError, tf.errors.OpError):  # the operation takes one example, or as many as the weights have rows
            return None
    sizes = inferred.outputs[tensor.value_index].shape
    return sizes.as_list().index(_MARK) if sizes.rank and _MARK in sizes.as_list() else None


def _reshaped(before: tf.TensorShape, after: tf.TensorShape, axis: Axis) -> Axis | None:
    """Returns the axis that begins after as many numbers; a merged one if it contains the batch."""
    # what is merged or split behind the examples leaves them first
    if axis == Axis() and after.rank and after[0] != 1:
        return axis
    skipped, strides = before[: axis.number].num_elements(), 1
    for i, size in enumerate(after.as_list()):
        if skipped is None or size is None:
            return axis if axis == Axis() else None
        if strides * size > skipped * axis.rows:
            return Axis(i, skipped * axis.rows // strides)
        strides *= size
    return None
