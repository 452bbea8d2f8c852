"""Gradients whose last operations are done once, after the mean over towers, instead of once a tower.

The mean goes through linear operations: of what they get from each tower only the mean has to pass them. And a sum of
matrix products over towers is one product, of the towers' factors laid end to end. Both hold for the gradient of any
weights that are multiplied with a batch, transformed before that or not. For towers that share cores this is most of
what more of them cost: the gradients of large weights are no longer written, transformed and read again tower by tower.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

_DEPTH = 8  # of operations on constants that are compared; deeper ones count as different
_PRODUCTS = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV2": ("adj_x", "adj_y")}

_Sum = Callable[[Sequence[int]], tf.Tensor]  # the sum over the towers of these numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Postponed:
    """The gradient of one tower.

    Attributes:
      sum_of: builds the sum of these towers' gradients, by their numbers.
      tower: its number.
      known: what the tower computes for it, before the operations that are postponed.
    """

    sum_of: _Sum
    tower: int
    known: Sequence[tf.Tensor]

    def tensor(self) -> tf.Tensor:
        """Builds this tower's gradient."""
        return self.sum_of([self.tower])


def postponed(tower_grads: list[list[tuple]]) -> list[list[tuple]]:
    """Postpones what can be postponed.

    Args:
      tower_grads: over towers, a list over variables of (gradient, variable), the variables in one order in all.

    Returns:
      The same, but Postponed instead of dense gradients.
    """
    by_variable = []
    for row in zip(*tower_grads, strict=True):
        grads = [grad for grad, _ in row]
        if all(isinstance(grad, tf.Tensor) for grad in grads):
            known = [[] for _ in grads]
            sum_of = _sum(grads, known)
            row = [(Postponed(sum_of, i, known[i]), variable) for i, (_, variable) in enumerate(row)]
        by_variable.append(row)
    return [list(grads_and_vars) for grads_and_vars in zip(*by_variable, strict=True)]


def _sum(values: Sequence[tf.Tensor], known: list[list[tf.Tensor]]) -> _Sum:
    """Plans the sum of values, which are over towers; appends to `known`, over towers, what it is made from."""
    op, others = values[0].op, [value.op.inputs for value in values]
    if _are_alike(values):
        if op.type in ("Identity", "Reshape", "Transpose", "Sum") and _only_moves(values):
            whole = _sum([inputs[0] for inputs in others], known)
            return lambda towers: _moved(op, whole(towers))
        if op.type == "ConcatV2" and _are_same([inputs[-1] for inputs in others]):
            parts = [_sum(part, known) for part in list(zip(*others, strict=True))[:-1]]
            return lambda towers: tf.concat([part(towers) for part in parts], op.inputs[-1])
        if op.type in _PRODUCTS and values[0].dtype.is_floating:
            return _sum_of_products(values, known)
    return _sum_of_known(values, known)


def _sum_of_known(values: Sequence[tf.Tensor], known: list[list[tf.Tensor]]) -> _Sum:
    for value, of_tower in zip(values, known, strict=True):
        of_tower.append(value)
    return lambda towers: tf.add_n([values[i] for i in towers]) if len(towers) > 1 else values[towers[0]]


def _sum_of_products(values: Sequence[tf.Tensor], known: list[list[tf.Tensor]]) -> _Sum:
    """Plans it as a product with the sum, where one factor is the same in all towers, or as one product."""
    left, right = zip(*(value.op.inputs for value in values), strict=True)
    turned = [values[0].op.get_attr(name) for name in _PRODUCTS[values[0].op.type]]
    if _are_same(left):
        whole = _sum(right, known)
        return lambda towers: tf.matmul(left[0], whole(towers), *turned)
    if _are_same(right):
        whole = _sum(left, known)
        return lambda towers: tf.matmul(whole(towers), right[0], *turned)
    size = values[0].shape.num_elements()
    of_factors = [each[0].shape.num_elements() for each in (left, right)]
    # Of small products the sum takes less than laying their factors end to end.
    if None in (size, *of_factors) or size < sum(of_factors) or left[0].shape[:-2] != right[0].shape[:-2]:
        return _sum_of_known(values, known)
    lefts = _end_to_end(left, -2 if turned[0] else -1, known)
    rights = _end_to_end(right, -1 if turned[1] else -2, known)
    return lambda towers: tf.matmul(lefts(towers), rights(towers), *turned)


def _end_to_end(factors: Sequence[tf.Tensor], axis: int, known: list[list[tf.Tensor]]) -> _Sum:
    one = _sum_of_known(factors, known)
    return lambda towers: tf.concat([factors[i] for i in towers], axis) if len(towers) > 1 else one(towers)


def _only_moves(values: Sequence[tf.Tensor]) -> bool:
    """Whether operations with one large input leave its elements as they are, and do so alike in all towers."""
    op, size = values[0].op, values[0].shape.num_elements()
    if op.type == "Sum" and (size is None or size != op.inputs[0].shape.num_elements()):
        return False
    return all(_are_same(others) for others in list(zip(*(value.op.inputs for value in values), strict=True))[1:])


def _moved(op: tf.Operation, values: tf.Tensor) -> tf.Tensor:
    if op.type == "Identity":
        return values
    if op.type == "Transpose":
        return tf.transpose(values, op.inputs[1])
    return tf.reshape(values, op.outputs[0].shape if op.type == "Sum" else op.inputs[1])


def _are_same(values: Sequence[tf.Tensor], depth: int = _DEPTH) -> bool:
    """Whether all towers have one tensor, or make the same of the same constants."""
    first = values[0]
    if all(value is first for value in values):
        return True
    if not depth or not _are_alike(values) or first.op.op_def.is_stateful:
        return False
    inputs = list(zip(*(value.op.inputs for value in values), strict=True))
    return all(_are_same(each, depth - 1) for each in inputs) if inputs else first.op.type == "Const"


def _are_alike(values: Sequence[tf.Tensor]) -> bool:
    """Whether the towers' operations are of one type, with the same attributes."""
    kinds = [(value.op.type, value.value_index, len(value.op.inputs), _attributes(value.op)) for value in values]
    return all(kind == kinds[0] for kind in kinds)


def _attributes(op: tf.Operation) -> dict:
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
