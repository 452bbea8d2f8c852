"""Operations with a random state, whose draws depend on the number of towers and on restarts."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors

# Operations that draw have an attribute `seed`, or are a generator's.
_OF_GENERATORS = re.compile(r"Stateful(?!PartitionedCall)[A-Z]\w*|NonDeterministicInts|Rng\w+")
_WITHOUT_DRAWS = re.compile(r"RandomShuffleQueue.*|CudnnRNN.*(Backprop|Params).*|.*Dataset|ComputeAccidentalHits")
_PACKAGES = os.path.dirname(os.path.dirname(tf.__file__))
_LIBRARIES = tuple(os.path.join(_PACKAGES, name, "") for name in ("tensorflow", "keras", "tf_keras", "tf_slim"))
_TRAINER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def refuse_stateful(workload: str, stateful: Sequence[str]) -> None:
    """Raises GraphError that names the first of these operations, and what to use instead."""
    first, more = stateful[0], f" and {len(stateful) - 1} more" if len(stateful) > 1 else ""
    raise errors.GraphError(
        f"workload {workload}: {first}{more} would keep a random state of its own, so that results would depend on the "
        "number of towers and on resuming. Use tower_train.layers.dropout, random_uniform or random_normal, in "
        "`augment` the draws that it is given; or --allow_stateful_random to train all the same."
    )


def find(last: Sequence[tf.Operation]) -> Iterator[str]:
    """Yields the name, type and line of each operation with a random state on which the last ones depend, in the order
    of their creation; of one that calls functions for each such type in them."""
    # without those of initial values: what is computed from a variable depends on its handle only
    graph, needed = last[0].graph, {op.name for op in ancestors(last)}
    definition = graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in definition.library.function}
    for node in definition.node:
        for each in sorted(set(_types(node, bodies, set()))) if node.name in needed else ():
            line = source_line(graph.get_operation_by_name(node.name))
            yield f"{node.name.partition('/')[2] or node.name} ({each}, {line})"


def ancestors(operations: Sequence[tf.Operation], but: Sequence[str] = ()) -> set[tf.Operation]:
    """Returns the operations and all that they depend on, but not beyond operations of some types."""
    reached, left = set(), list(operations)
    while left:
        op = left.pop()
        if op not in reached and op.type not in but:
            reached.add(op)
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return reached


def _types(node, bodies: dict[str, Sequence], seen: set[str]) -> Iterator[str]:
    """Yields the types by which a node draws: its own, and those within the functions that it calls."""
    if _draws(node):
        yield node.op
    for attr in node.attr.values():
        for name in {attr.func.name, *(function.name for function in attr.list.func)} - seen:
            seen.add(name)
            for inner in bodies.get(name, ()):
                yield from _types(inner, bodies, seen)


def _draws(node) -> bool:
    # a dropout of 0 and a generator that is told to be deterministic draw nothing
    if "seed" not in node.attr or _WITHOUT_DRAWS.fullmatch(node.op):
        return bool(_OF_GENERATORS.fullmatch(node.op))
    return not node.attr["deterministic"].b and ("dropout" not in node.attr or node.attr["dropout"].f > 0)


def is_of_keras(frames: Iterable) -> bool:
    """Returns whether a call of Keras is among the frames of a stack."""
    return any(frame.filename.startswith(_LIBRARIES[1]) for frame in frames)


def source_line(op: tf.Operation) -> str:
    """Returns the innermost line that made an operation and is not TensorFlow's or Keras' own."""
    lines = [(frame.filename, frame.lineno) for frame in op.traceback if not frame.filename.startswith("<frozen ")]
    outside = [line for line in lines if not line[0].startswith((*_LIBRARIES, _TRAINER))] or lines
    return f"{os.path.basename(outside[-1][0])}:{outside[-1][1]}"
