"""The axis of a tensor along which a tower's examples lie, found from the operations between the batch and the tensor.

Sizes alone do not tell: a sequence may be as long as the batch.
"""

from collections.abc import Callable

import tensorflow as tf

_REDUCTIONS = frozenset({"Mean", "Sum", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"})

Axes = dict[str, int | None]  # {a tensor's name: its axis of examples}


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
            size = each.shape[axis] if axis is not None else None
            # a multiple of the batch is several rows an example; any other size is another axis
            known[each.name] = None if batch and size is not None and size % batch else axis
    return known[tensor.name]


def _axis(tensor: tf.Tensor, known: Axes) -> int | None:
    """Returns the axis, given the axes of the operation's inputs."""
    op = tensor.op
    found = [(known.get(each.name), i) for i, each in enumerate(op.inputs) if each.shape.rank is not None]
    found = [(axis, i) for axis, i in found if axis is not None]
    if not found or tensor.shape.rank is None:
        return None
    # of the input with the most axes, as the others are broadcast to it
    axis, source = max(found, key=lambda each: op.inputs[each[1]].shape.rank)
    rule = _RULES.get(op.type, _through_reduction if op.type in _REDUCTIONS else _aligned)
    axis = rule(tensor, axis, source)
    return axis if axis is not None and axis < tensor.shape.rank else None


def _aligned(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    """Elementwise operations align axes from the last; layers keep the rank."""
    axis += tensor.shape.rank - tensor.op.inputs[source].shape.rank
    return axis if axis >= 0 else None


def _through_reduction(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    rank, axes = tensor.op.inputs[0].shape.rank, tf.get_static_value(tensor.op.inputs[1])
    if axes is None:
        return None
    gone = {each % rank for each in axes.reshape(-1).tolist()}
    if axis in gone:
        return None
    return axis if tensor.op.get_attr("keep_dims") else axis - sum(each < axis for each in gone)


def _through_transpose(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    order = tf.get_static_value(tensor.op.inputs[1])
    return None if order is None else order.tolist().index(axis)


def _through_reshape(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    """The axis that begins after as many numbers; a merged one if it contains the batch."""
    # what is merged or split behind the examples leaves them first
    if axis == 0 and tensor.shape.rank and tensor.shape[0] != 1:
        return 0
    before, strides = tensor.op.inputs[0].shape[:axis].num_elements(), 1
    for i, size in enumerate(tensor.shape.as_list()):
        if before is None or size is None:
            return i if before is None and i == axis else (0 if axis == 0 else None)
        if strides * size > before:
            return i
        strides *= size
    return None


def _through_matmul(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    """Rows of the first factor, columns of the second, or an axis before those; not the axis that is summed over."""
    op, rank = tensor.op, tensor.op.inputs[source].shape.rank
    if axis < rank - 2:
        return axis + tensor.shape.rank - rank
    first, second = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    kept = not op.get_attr(second) if source else op.get_attr(first)
    return tensor.shape.rank - 2 + source if axis - (rank - 2) == kept else None


def _through_unpack(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    along = tensor.op.get_attr("axis") % tensor.op.inputs[0].shape.rank
    return None if axis == along else axis - (along < axis)


def _through_pack(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    return axis + (tensor.op.get_attr("axis") % tensor.shape.rank <= axis)


def _through_expansion(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    at = tf.get_static_value(tensor.op.inputs[1])
    return None if at is None else axis + (int(at.reshape(-1)[0]) % tensor.shape.rank <= axis)


def _through_squeeze(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    shape = tensor.op.inputs[0].shape
    gone = [each % shape.rank for each in tensor.op.get_attr("squeeze_dims")]
    # without axes all of size 1 go
    gone = gone or [i for i, size in enumerate(shape.as_list()) if size == 1]
    return None if axis in gone else axis - sum(each < axis for each in gone)


def _through_slice(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    """x[1], x[:, tf.newaxis], x[..., 0]: by the specification's places, from the first."""
    masks = {name: tensor.op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis")}
    begin = tensor.op.inputs[1].shape
    at = result = 0
    for bit in range(begin[0] or 0):
        is_ = {name: mask >> bit & 1 for name, mask in masks.items()}
        if is_["ellipsis"]:
            later = range(bit + 1, begin[0])
            rest = sum(not masks["new_axis"] >> each & 1 for each in later)
            skipped = tensor.op.inputs[0].shape.rank - rest - at
            if at <= axis < at + skipped:
                return result + axis - at
            at, result = at + skipped, result + skipped
        elif is_["new_axis"]:
            result += 1
        elif at == axis:
            return None if is_["shrink_axis"] else result
        else:
            at, result = at + 1, result + 1 - is_["shrink_axis"]
    return result + axis - at


def _through_gather(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    """Rows of a table by the examples' indices; or columns of the examples, or some or one of them."""
    along = tf.get_static_value(tensor.op.inputs[2]) if len(tensor.op.inputs) > 2 else 0
    if along is None or (tensor.op.type == "GatherV2" and tensor.op.get_attr("batch_dims")):
        return axis
    along = int(along) % tensor.op.inputs[0].shape.rank
    added = (tensor.op.inputs[1].shape.rank or 0) - 1
    if source == 1:
        return along + axis
    return None if axis == along and added < 0 else axis + added * (axis > along)


def _through_einsum(tensor: tf.Tensor, axis: int, source: int) -> int | None:
    inputs, _, output = tensor.op.get_attr("equation").decode().replace(" ", "").partition("->")
    letters = inputs.split(",")[source]
    if "." in letters:
        return _aligned(tensor, axis, source)
    place = output.find(letters[axis])
    return place if place >= 0 and "." not in output else None


_RULES: dict[str, Callable[[tf.Tensor, int, int], int | None]] = {
    "Transpose": _through_transpose,
    "Reshape": _through_reshape,
    "MatMul": _through_matmul,
    "BatchMatMulV2": _through_matmul,
    "Unpack": _through_unpack,
    "Pack": _through_pack,
    "ExpandDims": _through_expansion,
    "Squeeze": _through_squeeze,
    "StridedSlice": _through_slice,
    "Gather": _through_gather,
    "GatherV2": _through_gather,
    "Einsum": _through_einsum,
}
