"""Towers that share cores, computed together: an operation that all have is done once, on the batches of all of them.

The towers stay in the graph as they were built, with their names, losses and gradients, and are the definition: whoever
asks for a tensor of theirs gets it from them. The step only asks for other tensors of the same values. Layer by layer
the towers' tensors are laid end to end, which for their input is the batch as it came, and each operation is made once
more for all of them, by rules that hold element by element (joined_rules). What has none, such as batch normalisation
over a tower's own batch, is made for each tower on its part; what is the same in all towers is taken from the first.
So N towers of one CPU take the time of one with the batch of all.

An operation with an effect, or one that waits for such a one, cannot be made once more: a network with one of its own
is computed tower by tower (NotJoined). So is every network with --join_towers=false, and on GPUs, which this is tested
against.
"""

from collections.abc import Sequence

import tensorflow as tf

from tower_train.graph.joined_rules import RULES, made
from tower_train.graph.joined_values import Apart, Joined, Same, Value, join, split, whole

v1 = tf.compat.v1

SCOPE = "joined/"  # of the operations that are made here
_PASSED = ("Identity", "IdentityN", "StopGradient", "PreventGradient")
_READS = ("ReadVariableOp", "ResourceGather", "VariableShape")  # whose state is that of a variable before the update
_DEPTH = 8  # of operations on constants that are compared; deeper ones count as different
_OLD_LOOPS = ("Enter", "Exit", "NextIteration", "Switch", "Merge", "RefSwitch", "RefMerge")


class CannotJoin(Exception):
    """A tower has an operation with effects, or in an order, that must not be repeated."""


class JoinedTowers:
    """The tensors of towers that were built alike, computed together.

    Attributes:
      towers: how many.
      reads: operations of theirs that read variables, of which only the first tower's are used here.
    """

    def __init__(self, given: Sequence[Sequence[tf.Tensor]]):
        """Takes over towers what they are given, such as batches: they are computed from these."""
        self.towers, self.reads = len(given), []
        with v1.name_scope(SCOPE):
            self._known = {_key(tensors): whole(tensors) or Apart(tensors) for tensors in zip(*given, strict=True)}
        self._joined, self._split = {}, {}  # by value

    def value(self, tensors: Sequence[tf.Tensor]) -> Value:
        """Returns what holds these tensors' values.

        Args:
          tensors: over towers, the same tensor of each.

        Raises:
          CannotJoin: their operations cannot be repeated.
        """
        with v1.name_scope(SCOPE), v1.control_dependencies(None):
            left = [tuple(tensors)]
            while left:
                if self._find(left[-1]):
                    left.pop()
                    continue
                ops = [tensor.op for tensor in left[-1]]
                inputs, awaited = _needed(ops)
                if missing := [each for each in inputs + awaited if self._find(each) is None]:
                    left += missing
                    continue
                outputs = zip(*(op.outputs for op in ops), strict=True)
                for each, value in zip(outputs, self._outputs(ops, list(map(self._find, inputs))), strict=True):
                    self._known[_key(each)] = value
            return self._find(tuple(tensors))

    def joined(self, value: Value) -> Same | Joined | None:
        """Lays what the towers have apart end to end; None if it cannot be."""
        if not isinstance(value, Apart):
            return value
        if value not in self._joined:
            with v1.name_scope(SCOPE):
                self._joined[value] = join(value)
        return self._joined[value]

    def apart(self, value: Value) -> Sequence[tf.Tensor]:
        """Returns each tower's tensor."""
        if value not in self._split:
            with v1.name_scope(SCOPE):
                self._split[value] = split(value, self.towers)
        return self._split[value]

    def _find(self, tensors: Sequence[tf.Tensor]) -> Value | None:
        if all(tensor is tensors[0] for tensor in tensors):
            return Same(tensors[0])
        return self._known.get(_key(tensors))

    def _outputs(self, ops: Sequence[tf.Operation], inputs: Sequence[Value]) -> Sequence[Value]:
        first = ops[0]
        alike = are_alike(ops)
        if first.type in _READS:
            self.reads += ops
        if alike and all(isinstance(value, Same) for value in inputs):
            return [Same(tensor) for tensor in made(first, [value.tensor for value in inputs])]
        if first.type in _PASSED:
            return inputs
        if alike and first.type in RULES and all(joined := list(map(self.joined, inputs))):
            outputs = RULES[first.type](self.towers, first, joined)
            if outputs is not None:
                return outputs
        return self._one_by_one(ops, inputs)

    def _one_by_one(self, ops: Sequence[tf.Operation], inputs: Sequence[Value]) -> Sequence[Value]:
        parts = list(zip(*map(self.apart, inputs), strict=True)) or [()] * self.towers
        outputs = [made(op, part) for op, part in zip(ops, parts, strict=True)]
        axes = [value.axis for value in inputs if not isinstance(value, Same)] or [0]
        return [Apart(each, axes[0]) for each in zip(*outputs, strict=True)]


class NotJoined:
    """The tensors of towers that cannot be computed together, in the same form: each from its own operations."""

    def __init__(self, towers: int):
        self.towers, self.reads = towers, []

    def value(self, tensors: Sequence[tf.Tensor]) -> Value:
        return Same(tensors[0]) if are_same(tensors) else Apart(tensors)

    def joined(self, value: Value) -> Same | None:
        return value if isinstance(value, Same) else None

    def apart(self, value: Value) -> Sequence[tf.Tensor]:
        return split(value, self.towers)


def are_same(tensors: Sequence[tf.Tensor], depth: int = _DEPTH) -> bool:
    """Whether all towers have one tensor, or make the same of the same constants."""
    first = tensors[0]
    if all(tensor is first for tensor in tensors):
        return True
    ops = [tensor.op for tensor in tensors]
    if not depth or first.op.op_def.is_stateful or not are_alike(ops):
        return False
    inputs = list(zip(*(op.inputs for op in ops), strict=True))
    return all(are_same(each, depth - 1) for each in inputs) if inputs else first.op.type == "Const"


def are_alike(ops: Sequence[tf.Operation]) -> bool:
    """Whether operations are of one type, with the same attributes."""
    first = ops[0]
    if any(op.type != first.type or len(op.inputs) != len(first.inputs) for op in ops):
        return False
    attributes = _attributes(first)
    return all(_attributes(op) == attributes for op in ops[1:])


def _attributes(op: tf.Operation) -> dict:
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}


def _needed(ops: Sequence[tf.Operation]) -> tuple[list[tuple[tf.Tensor, ...]], list[tuple[tf.Tensor, ...]]]:
    """Returns the inputs of the towers' operation, and what it only waits for, over towers each.

    An order among operations without effects, as gradients have it, need not be kept.

    Raises:
      CannotJoin: it has an effect or waits for one, or another operation is in its place in another tower.
    """
    first = ops[0]
    sizes = [(op.type, len(op.inputs), len(op.control_inputs)) for op in ops]
    if any(size != sizes[0] for size in sizes):
        raise CannotJoin(f"{first.name} has no counterpart in each tower")
    if first.op_def.is_stateful and first.type not in _READS or first.type in _OLD_LOOPS:
        raise CannotJoin(f"{first.name} is a {first.type}")
    if any(not op.outputs for op in first.control_inputs):
        raise CannotJoin(f"{first.name} waits for {', '.join(op.name for op in first.control_inputs)}")
    awaited = [[op.outputs[0] for op in op.control_inputs if op.outputs] for op in ops]
    return list(zip(*(op.inputs for op in ops), strict=True)), list(zip(*awaited, strict=True))


def _key(tensors: Sequence[tf.Tensor]) -> tuple[int, ...]:
    return tuple(map(id, tensors))
