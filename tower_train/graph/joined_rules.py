"""Operations that do for the batches of all towers, end to end, what they do for each: the rules for each type.

A rule gets the number of towers, one tower's operation and its inputs, Same or Joined, at least one of them Joined. It
returns the outputs, which hold the very numbers that each tower's operation makes, or None if this operation on that
input needs each tower's batch by itself. What is not here does too.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train.graph.joined_values import Joined, Same, Value, reshaped, scaled, spread, static_shape

Rule = Callable[[int, tf.Operation, Sequence[Value]], Sequence[Value] | None]


def made(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The outputs of an operation on these inputs, which may be its own."""
    if all(new is old for new, old in zip(inputs, op.inputs, strict=True)):
        return op.outputs
    return repeated(op, inputs)


def repeated(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The outputs of an operation that is made once more, in the default graph, on these inputs."""
    attrs = {name: value for name, value in op.node_def.attr.items() if name not in ("_class", "_output_shapes")}
    dtypes = [output.dtype.base_dtype for output in op.outputs]
    name = op.name.partition("/")[2] or op.name
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(op.type, list(inputs), dtypes, name=name, attrs=attrs, op_def=op.op_def).outputs


def constant(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a tensor of integers that is the same in every step; None if it is not, or cannot be told."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.shape.rank == 1:
        filled = tf.fill(tensor, 0).shape  # TensorFlow's own inference, which computes what follows from constants
        value = np.array(filled) if filled.is_fully_defined() else None
    return value


def _outputs(op: tf.Operation, tensors: Sequence[tf.Tensor], axes: Sequence[int], outer: int) -> list[Value] | None:
    """The outputs of these tensors, whose shapes in one tower are as TensorFlow knows them."""
    shapes = [static_shape(output) for output in op.outputs]
    if None in shapes:
        return None
    return [Joined(*each, outer) for each in zip(tensors, shapes, axes, strict=True)]


def _first_joined(inputs: Sequence[Value]) -> Joined:
    return next(value for value in inputs if isinstance(value, Joined))


def _elementwise(towers: int, op: tf.Operation, inputs: Sequence[Value], broadcasts: bool = True):
    place, shape = _first_joined(inputs).place, static_shape(op.outputs[0])
    if shape is None or shape[place[0]] != place[1]:
        return None
    tensors = [spread(value, place, towers, broadcasts) for value in inputs]
    if any(tensor is None for tensor in tensors):
        return None
    return _outputs(op, made(op, tensors), [len(shape) + place[0]], place[2])


def _of_one_shape(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    return _elementwise(towers, op, inputs, broadcasts=False)


def _by_axis(is_free: Callable[[tf.Operation, Joined], bool]) -> Rule:
    """For operations on inputs whose axis of the batch, if it is free, is that of the outputs; others are the same."""

    def rule(towers: int, op: tf.Operation, inputs: Sequence[Value]):
        joined = [value for value in inputs if isinstance(value, Joined)]
        first = joined[0]
        size = first.shape[first.axis]
        alike = all((v.axis, v.outer) == (first.axis, first.outer) and v.shape[v.axis] == size for v in joined)
        if not alike or not is_free(op, first):
            return None
        tensors = [value.tensor for value in inputs]
        return _outputs(op, made(op, tensors), [first.axis] * len(op.outputs), first.outer)

    return rule


def _is_examples(op: tf.Operation, value: Joined) -> bool:
    del op
    return value.axis == 0 and value.outer == 1


def _of_examples(count: int) -> Rule:
    """For operations whose first inputs have the batch first, and whose others are the same for all examples."""
    by_axis = _by_axis(_is_examples)

    def rule(towers: int, op: tf.Operation, inputs: Sequence[Value]):
        if any(isinstance(value, Joined) != (i < count) for i, value in enumerate(inputs)):
            return None
        return by_axis(towers, op, inputs)

    return rule


def _is_not_last(op: tf.Operation, value: Joined) -> bool:
    return value.axis < len(value.shape) - 1 and op.node_def.attr["data_format"].s in (b"", b"NHWC")


def _is_not_pooled(op: tf.Operation, value: Joined) -> bool:
    return op.get_attr("ksize")[value.axis] == op.get_attr("strides")[value.axis] == 1


def _bias_add(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    return _by_axis(_is_not_last)(towers, op, inputs) if isinstance(inputs[1], Same) else None


def _pool_grad(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    return _by_axis(_is_not_pooled)(towers, op, inputs) if all(isinstance(v, Joined) for v in inputs) else None


def _product(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    """Matrix products with the batch among the left one's rows, the right one's columns, or the axes before these."""
    x, y = inputs
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    turned = [op.get_attr(name) for name in names]
    rows, columns = -1 if turned[0] else -2, -2 if turned[1] else -1
    first, shape = _first_joined(inputs), static_shape(op.outputs[0])
    axis, size, outer = first.place
    if shape is None:
        return None
    if axis < -2:
        tensors = [spread(value, first.place, towers) for value in inputs]
        if any(tensor is None for tensor in tensors) or shape[axis] != size:
            return None
    elif isinstance(y, Same) and axis == rows:
        tensors, axis = [x.tensor, y.tensor], -2
    elif isinstance(x, Same) and axis == columns:
        tensors, axis = [x.tensor, y.tensor], -1
    else:
        return None
    return _outputs(op, made(op, tensors), [len(shape) + axis], outer)


def _reshape(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    shape = static_shape(op.outputs[0])
    value = reshaped(inputs[0], shape, towers) if shape and isinstance(inputs[0], Joined) else None
    return value and [value]


def _transpose(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    value, order = inputs[0], constant(op.inputs[1])
    if order is None or not isinstance(inputs[1], Same):
        return None
    axis = list(order).index(value.axis)
    return _outputs(op, made(op, [value.tensor, inputs[1].tensor]), [axis], value.outer)


def _reduction(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    value, axes = inputs[0], constant(op.inputs[1])
    if axes is None or not isinstance(inputs[1], Same):
        return None
    rank = len(value.shape)
    axes = {int(axis) % rank for axis in np.ravel(axes)}
    if not axes:
        return [value]
    if value.axis in axes:
        return None
    tensor = made(op, [value.tensor, inputs[1].tensor])[0]
    if op.get_attr("keep_dims"):
        shape = [1 if i in axes else size for i, size in enumerate(value.shape)]
        return [Joined(tensor, tuple(shape), value.axis, value.outer)]
    shape = [size for i, size in enumerate(value.shape) if i not in axes]
    return [Joined(tensor, tuple(shape), value.axis - sum(i < value.axis for i in axes), value.outer)]


def _along(axis_at: int) -> Rule:
    """For ConcatV2 and splits along an axis that is not the batch's; axis_at: its place among the inputs."""

    def rule(towers: int, op: tf.Operation, inputs: Sequence[Value]):
        first, along = _first_joined(inputs), constant(op.inputs[axis_at])
        rank = len(first.shape)
        if along is None or int(along) % rank == first.axis or not isinstance(inputs[axis_at], Same):
            return None
        tensors = list(map(_tensor, inputs))
        for i, value in enumerate(inputs):
            if isinstance(value, Joined) or op.type == "ConcatV2" and i != len(inputs) - 1:
                tensors[i] = spread(value, first.place, towers, broadcasts=False)
        if any(tensor is None for tensor in tensors):
            return None
        return _outputs(op, made(op, tensors), [first.axis] * len(op.outputs), first.outer)

    return rule


def _slice(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    value, begin, shape = inputs[0], constant(op.inputs[1]), static_shape(op.outputs[0])
    if not isinstance(value, Joined) or not isinstance(inputs[1], Same) or begin is None or shape is None:
        return None
    if begin[value.axis] or shape[value.axis] != value.shape[value.axis]:
        return None
    sizes = tf.constant(scaled(shape, value.axis, towers), op.inputs[2].dtype)
    return _outputs(op, made(op, [value.tensor, inputs[1].tensor, sizes]), [value.axis], value.outer)


def _pad(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    value, pads = inputs[0], constant(op.inputs[1])
    if pads is None or not isinstance(inputs[1], Same) or any(pads[value.axis]):
        return None
    return _outputs(op, made(op, list(map(_tensor, inputs))), [value.axis], value.outer)


def _conv_input_grad(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    shape, (_, filters, grad) = static_shape(op.outputs[0]), inputs
    if shape is None or not (isinstance(filters, Same) and isinstance(grad, Joined) and _is_examples(op, grad)):
        return None
    sizes = tf.constant(scaled(shape, 0, towers), op.inputs[0].dtype)
    return _outputs(op, made(op, [sizes, filters.tensor, grad.tensor]), [0], 1)


def _shape(towers: int, op: tf.Operation, inputs: Sequence[Value]):
    """Answers with the shapes of one tower's tensors, as its network expects."""
    del towers, inputs
    shapes = [static_shape(tensor) for tensor in op.inputs]
    if None in shapes:
        return None
    return [Same(tf.constant(shape, output.dtype)) for shape, output in zip(shapes, op.outputs, strict=True)]


def _tensor(value: Same | Joined) -> tf.Tensor:
    return value.tensor


_BROADCASTING = """
    Abs Add AddV2 Cast Elu Exp FloorDiv Log Maximum Minimum Mul Neg RealDiv Relu Relu6 Rsqrt SelectV2 Sigmoid Sqrt
    Square SquaredDifference Sub Tanh ZerosLike
"""
_OF_ONE_SHAPE = "AddN EluGrad Relu6Grad ReluGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad"
RULES: dict[str, Rule] = {
    **dict.fromkeys(_BROADCASTING.split(), _elementwise),
    **dict.fromkeys(_OF_ONE_SHAPE.split(), _of_one_shape),
    **dict.fromkeys(("MatMul", "BatchMatMulV2"), _product),
    **dict.fromkeys(("MaxPool", "MaxPool3D"), _by_axis(_is_not_pooled)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), _pool_grad),
    **dict.fromkeys(("Reshape", "Squeeze", "ExpandDims"), _reshape),
    **dict.fromkeys(("Sum", "Mean"), _reduction),
    **dict.fromkeys(("Shape", "ShapeN"), _shape),
    "BiasAdd": _bias_add,
    "ConcatV2": _along(-1),
    "Conv2D": _of_examples(1),
    "Conv2DBackpropInput": _conv_input_grad,
    "LogSoftmax": _by_axis(_is_not_last),
    "Pad": _pad,
    "Slice": _slice,
    "SparseSoftmaxCrossEntropyWithLogits": _of_examples(2),
    "SplitV": _along(2),
    "Transpose": _transpose,
}
