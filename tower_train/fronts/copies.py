"""Copies of the operations of a program's tower for other towers: on their devices, with their part of the batch."""

import functools
import re
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tower_train.fronts import compat
from tower_train.graph import xla
from tower_train.graph.random_state import ancestors

v1 = tf.compat.v1
_WITH_BODIES = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_COMPOSITES = (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)


class Copy:
    """Another tower than the program's.

    Args:
      number: how many towers after the program's it is.
      scope, device: its name scope and device.
      first_scope, first_device: those of the program's tower.
    """

    def __init__(self, number: int, scope: str, device: str, first_scope: str, first_device: str):
        self.given: dict[str, tf.Tensor] = {}  # by the names of tensors that the program takes for them
        self.ops: dict[str, tf.Operation] = {}  # by the names of the program's
        self._number, self._scope, self._first_scope = number, scope, first_scope
        self._part, self._first_part = map(xla.canonical, (device, first_device))
        self._device = functools.cache(functools.partial(_moved, device, first_device))

    def of(self, value: Any) -> Any:
        """Returns its value of a structure that the program has."""
        if isinstance(value, tf.Tensor) and hasattr(value, "graph"):
            mine = self.tensor(value)
            if mine is not value:
                mine.set_shape(value.shape)
                compat.attach(mine, self.of(compat.attached(value)))
            return mine
        if isinstance(value, _COMPOSITES):
            return tf.nest.map_structure(self.of, value, expand_composites=True)
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            mine = map(self.of, value)
            return type(value)(*mine) if hasattr(value, "_fields") else type(value)(mine)
        return value

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns its tensor for one of the program's: the same if it is every tower's."""
        op = self.ops.get(tensor.op.name)
        return op.outputs[tensor.value_index] if op else self.given.get(tensor.name, tensor)

    def name(self, name: str) -> str:
        """Returns the name of the copy of an operation."""
        first = self._first_scope
        return name.replace(first, self._scope, 1) if first in name else f"{self._scope}{first}{name}"

    def adapt(self, node, names: Collection[str]) -> None:
        """Changes what a copied node says of devices and of other operations; `names` are copied with it."""
        attr = node.attr
        beside = [each.decode().removeprefix("loc:@") for each in attr["_class"].list.s] if "_class" in attr else []
        if all(name in names for name in beside):
            node.device = self._device(node.device)
        if beside:
            attr["_class"].list.s[:] = [f"loc:@{self.name(name)}".encode() for name in beside if name in names]
        if "frame_name" in attr:  # of a loop
            attr["frame_name"].s = f"{self._scope}{attr['frame_name'].s.decode()}".encode()
        if node.op not in compat.DRAWS_OF_TENSORFLOW and (attr["seed"].i or attr["seed2"].i if "seed2" in attr else 0):
            attr["seed2"].i += self._number  # what is not drawn by example, each tower draws for itself
        xla.move(attr, self._first_part, self._part)


def copy(ops: Sequence[tf.Operation], towers: Sequence[Copy]) -> None:
    """Makes towers' copies of operations, except those that are the same for all."""
    ops = [op for op in ops if not _is_shared(op)]
    # A gradient lets a loop or a branch have further outputs, and a loop further inputs.
    used = {tensor.op.name: tensor.op for op in ops for tensor in op.inputs if tensor.op.type in _WITH_BODIES}
    grown = [op for name, op in used.items() if name in towers[0].ops and _has_grown(op, towers[0].ops[name])]
    if grown:
        first = ancestors([each.op for op in grown for each in op.inputs[len(towers[0].ops[op.name].inputs) :]])
        _import([op for op in ops if op in first], towers)
        ops = [op for op in ops if op not in first]
    for op in grown:
        for tower in towers:
            mine = tower.ops[op.name]
            compat.follow(mine, op, list(map(tower.tensor, op.inputs[len(mine.inputs) :])))
    _import(ops, towers)


def _has_grown(op: tf.Operation, copied: tf.Operation) -> bool:
    return len(copied.outputs) != len(op.outputs)


def _import(ops: Sequence[tf.Operation], towers: Sequence[Copy]) -> None:
    if not ops:
        return
    graph, nodes, names, inputs, waits = ops[0].graph, [op.node_def for op in ops], {op.name for op in ops}, {}, []
    graph_def = v1.GraphDef(versions=graph.graph_def_versions)
    for tower in towers:
        for op, node in zip(ops, nodes, strict=True):
            mine = graph_def.node.add()
            mine.CopyFrom(node)
            mine.name = tower.name(op.name)
            tower.adapt(mine, names)
            del mine.input[:]
            for tensor in op.inputs:
                if tensor.op.name in names:
                    mine.input.append(f"{tower.name(tensor.op.name)}:{tensor.value_index}")
                else:
                    given = tower.tensor(tensor)
                    inputs[given.name] = given
                    mine.input.append(given.name)
            mine.input.extend(f"^{tower.name(each.name)}" for each in op.control_inputs if each.name in names)
            waits.append([tower.ops.get(each.name, each) for each in op.control_inputs if each.name not in names])
    copied = compat.import_nodes(graph_def, inputs, [node.name for node in graph_def.node])
    for op, others in zip(copied, waits, strict=True):
        if others:
            compat.wait_for(op, others)
    for i, tower in enumerate(towers):
        tower.ops.update(zip((op.name for op in ops), copied[i * len(ops) :], strict=False))


def _is_shared(op: tf.Operation) -> bool:
    """Returns whether an operation is every tower's: what holds a state by its name, assigns to it, or reads it whole;
    and what is fed or captured."""
    handle = op.inputs[0] if op.inputs else None
    is_of_state = handle is not None and (handle.dtype == tf.resource or handle.dtype != handle.dtype.base_dtype)
    return (
        "shared_name" in op.node_def.attr
        or op.type == "Placeholder"
        or (is_of_state and re.search("Assign|Scatter", op.type) is not None)
        or (op.type == "ReadVariableOp" and handle.op.type in ("VarHandleOp", "Placeholder"))
    )


def _moved(device: str, first: str, name: str) -> str:
    """Returns the name of a device for an operation of another tower than that with the device `first`."""
    if xla.canonical(name) != xla.canonical(first):
        return name
    mine = tf.DeviceSpec.from_string(device)
    moved = tf.DeviceSpec.from_string(name).replace(device_type=mine.device_type, device_index=mine.device_index)
    return moved.to_string()
