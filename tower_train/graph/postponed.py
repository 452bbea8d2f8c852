"""Gradients whose last operations are done once, after the mean over towers, instead of once a tower.

The mean goes through linear operations: of what they get from each tower only the mean has to pass them. And a sum of
matrix products over towers is one product, of the towers' factors laid end to end. Both hold for the gradient of any
weights that are multiplied with a batch, transformed before that or not. For towers that share cores this is most of
what more of them cost: the gradients of large weights are no longer written, transformed and read again tower by tower.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train.graph.joined import SCOPE, CannotJoin, JoinedTowers, NotJoined, are_alike, are_same
from tower_train.graph.joined_rules import constant, repeated
from tower_train.graph.joined_values import Apart, Joined, Same, Value, join, one_of, total

_PRODUCTS = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV2": ("adj_x", "adj_y")}
_EVERY = None  # in place of a tower's number

_Mean = Callable[[int | None], tf.Tensor]  # builds the mean over every tower, or the value of one


@dataclasses.dataclass(frozen=True, eq=False)
class Postponed:
    """The gradient of one tower.

    Attributes:
      mean_of: builds the gradient of a tower by its number, or the mean over all towers for None.
      tower: its number.
      known: what the tower computes for it, before the operations that are postponed.
    """

    mean_of: _Mean
    tower: int
    known: Sequence[tf.Tensor]

    def tensor(self) -> tf.Tensor:
        """Builds this tower's gradient."""
        return self.mean_of(self.tower)

    def mean(self) -> tf.Tensor:
        """Builds the mean over all towers."""
        with tf.compat.v1.name_scope(SCOPE):
            return self.mean_of(_EVERY)


@dataclasses.dataclass(frozen=True)
class Together:
    """Towers that are computed together.

    Attributes:
      tower_grads: over towers, a list over variables of (gradient, variable), Postponed instead of dense gradients.
      others: over towers, the tensors of other things.
      reads: the towers' operations that read variables.
    """

    tower_grads: list[list[tuple]]
    others: list[Sequence[tf.Tensor]]
    reads: list[tf.Operation]


def together(
    tower_grads: list[list[tuple]], others: list[Sequence[tf.Tensor]], given: list[Sequence[tf.Tensor]]
) -> Together:
    """Computes towers that share cores together, as far as their operations can be; see joined.

    Args:
      tower_grads: over towers, a list over variables of (gradient, variable), the variables in one order in all.
      others: over towers, what else a step needs of them.
      given: over towers, the tensors that they compute these from.
    """
    try:
        return _together(tower_grads, others, JoinedTowers(given))
    except CannotJoin:
        return not_joined(tower_grads, others, len(given))


def not_joined(tower_grads: list[list[tuple]], others: list[Sequence[tf.Tensor]], towers: int) -> Together:
    """Computes only the ends of their gradients together."""
    return _together(tower_grads, others, NotJoined(towers))


def _together(tower_grads: list, others: list, towers: JoinedTowers | NotJoined) -> Together:
    by_variable = []
    for row in zip(*tower_grads, strict=True):
        grads, variables = zip(*row, strict=True)
        if all(isinstance(grad, tf.Tensor) for grad in grads):
            plan = _Plan(towers)
            mean_of = plan.mean(grads)
            grads = [Postponed(mean_of, i, plan.known) for i in range(towers.towers)]
        elif all(isinstance(grad, tf.IndexedSlices) for grad in grads):
            parts = _apart(towers, [(grad.values, grad.indices) for grad in grads])
            grads = [tf.IndexedSlices(*part, grad.dense_shape) for part, grad in zip(parts, grads, strict=True)]
        by_variable.append(list(zip(grads, variables, strict=True)))
    others = _apart(towers, others)
    return Together([list(row) for row in zip(*by_variable, strict=True)], others, towers.reads)


def _apart(towers: JoinedTowers | NotJoined, tensors: list[Sequence[tf.Tensor]]) -> list[Sequence[tf.Tensor]]:
    """Replaces tensors, which are over towers, with those that are computed together."""
    parts = [towers.apart(towers.value(each)) for each in zip(*tensors, strict=True)]
    return list(zip(*parts, strict=True))


class _Plan:
    """Plans the mean of one gradient over towers; `known` is what it is made from."""

    def __init__(self, towers: JoinedTowers | NotJoined):
        self._towers, self.known = towers, []

    def mean(self, values: Sequence[tf.Tensor]) -> _Mean:
        return self._sum(values, self._towers.towers)

    def _sum(self, values: Sequence[tf.Tensor], divisor: int) -> _Mean:
        """Plans the sum, divided where there is little to divide."""
        op = values[0].op
        if are_alike([value.op for value in values]):
            inputs = list(zip(*(value.op.inputs for value in values), strict=True))
            if places := _linear_in(op, inputs):
                after = divisor if op.type == "Cast" else 1  # below float32 the quotient would be rounded further
                parts = [
                    self._sum(each, divisor // after) if i in places else _same(each[0])
                    for i, each in enumerate(inputs)
                ]
                return lambda tower: _quotient(_again(values[0], parts, tower), tower, after)
            if op.type in _CONTRACTED and (factors := self._factors(op, list(map(self._towers.value, inputs)))):
                return self._contraction(values[0], factors, divisor)
        return self._of(self._towers.value(values), divisor)

    def _of(self, value: Value, divisor: int) -> _Mean:
        self.known += value.tensors if isinstance(value, Apart) else [value.tensor]
        count = self._towers.towers
        return lambda tower: (
            _quotient(total(value, count), tower, divisor) if tower is _EVERY else one_of(value, tower, count)
        )

    def _contraction(self, output: tf.Tensor, factors: list[Same | Joined], divisor: int) -> _Mean:
        """Plans an operation that sums over all examples of its joined inputs."""
        self.known += [factor.tensor for factor in factors]
        count = self._towers.towers
        sizes = {
            i: factor.tensor.shape.num_elements() for i, factor in enumerate(factors) if isinstance(factor, Joined)
        }
        smallest = min(sizes, key=sizes.get)
        if sizes[smallest] >= output.shape.num_elements():
            smallest = None

        def part(i: int, factor: Same | Joined) -> _Mean:
            by = divisor if i == smallest else 1
            return lambda tower: (
                _quotient(factor.tensor, tower, by) if tower is _EVERY else one_of(factor, tower, count)
            )

        parts = [part(i, factor) for i, factor in enumerate(factors)]
        return lambda tower: _quotient(_again(output, parts, tower), tower, divisor if smallest is None else 1)

    def _factors(self, op: tf.Operation, values: list[Value]) -> list[Same | Joined] | None:
        """The inputs of an operation that sums over the towers' batches if these are end to end; None if it does not,
        or takes more than the sum does: of small products, to lay their factors end to end."""
        axes, is_large = _CONTRACTED[op.type](op, values), True
        for i, axis in axes.items():
            if isinstance(values[i], Apart):
                joined = self._towers.joined(values[i])
                is_large &= joined is not None
                values[i] = joined or join(dataclasses.replace(values[i], axis=axis))
            if not isinstance(values[i], Joined) or values[i].axis != axis:
                return None
        parts, size = [values[i] for i in axes], op.outputs[0].shape.num_elements()
        if len({part.outer for part in parts}) != 1:
            return None
        if not is_large and (size is None or size < sum(math.prod(part.shape) for part in parts)):
            return None
        return values if all(isinstance(value, Same) for i, value in enumerate(values) if i not in axes) else None


def _again(output: tf.Tensor, parts: Sequence[_Mean], tower: int | None) -> tf.Tensor:
    return repeated(output.op, [part(tower) for part in parts])[output.value_index]


def _quotient(tensor: tf.Tensor, tower: int | None, divisor: int) -> tf.Tensor:
    return tensor / divisor if tower is _EVERY and divisor > 1 else tensor


def _same(tensor: tf.Tensor) -> _Mean:
    return lambda tower: tensor


def _linear_in(op: tf.Operation, inputs: Sequence[Sequence[tf.Tensor]]) -> set[int]:
    """The inputs that an operation is linear in, all others being the same in all towers, if it takes as much time or
    less after the sum; else none."""
    size = op.outputs[0].shape.num_elements()
    if op.type in ("Identity", "Reshape", "Transpose", "Sum", "Cast", "RealDiv"):
        places = {0} if size == op.inputs[0].shape.num_elements() or op.type == "Reshape" else set()
        if op.type == "Cast" and not (
            op.inputs[0].dtype.is_floating and op.inputs[0].dtype.size < op.outputs[0].dtype.size
        ):
            return set()
    elif op.type in ("AddN", "ConcatV2"):
        places = set(range(len(inputs) - (op.type == "ConcatV2")))
    elif op.type in (*_PRODUCTS, "Mul") and op.outputs[0].dtype.is_floating:
        places = {i for i, each in enumerate(inputs) if not are_same(each)}
        places = places if len(places) == 1 else set()
    else:
        places = set()
    return places if all(are_same(each) for i, each in enumerate(inputs) if i not in places) else set()


def _contracted_axes(op: tf.Operation, values: Sequence[Value]) -> dict[int, int]:
    """{input: the axis that a matrix product sums over}."""
    turned = [op.get_attr(name) for name in _PRODUCTS[op.type]]
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks or op.inputs[0].shape[:-2] != op.inputs[1].shape[:-2]:
        return {}
    return {0: ranks[0] - (2 if turned[0] else 1), 1: ranks[1] - (1 if turned[1] else 2)}


def _summed_axes(op: tf.Operation, values: Sequence[Value]) -> dict[int, int]:
    value, axes = values[0], constant(op.inputs[1])
    if not isinstance(value, Joined) or axes is None:
        return {}
    return {0: value.axis} if value.axis in [axis % len(value.shape) for axis in np.ravel(axes)] else {}


def _biases_axes(op: tf.Operation, values: Sequence[Value]) -> dict[int, int]:
    value = values[0]
    is_summed = (
        isinstance(value, Joined) and value.axis < len(value.shape) - 1 and op.get_attr("data_format") == b"NHWC"
    )
    return {0: value.axis} if is_summed else {}


# What sums over examples, {input: the axis of its examples}.
_CONTRACTED = {
    **dict.fromkeys(_PRODUCTS, _contracted_axes),
    "BiasAddGrad": _biases_axes,
    "Conv2DBackpropFilter": lambda op, values: {0: 0, 2: 0},
    "Sum": _summed_axes,
}
