"""Operations with random states of their own, whose draws depend on the towers and on restarts."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors

TYPES = frozenset(
    {
        "AllCandidateSampler", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "FixedUnigramCandidateSampler",
        "FractionalAvgPool", "FractionalMaxPool", "LearnedUnigramCandidateSampler", "LogUniformCandidateSampler",
        "Multinomial", "NonDeterministicInts", "ParameterizedTruncatedNormal", "RandomCrop", "RandomGamma",
        "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform",
        "RandomUniformInt", "RngReadAndSkip", "RngSkip", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2",
        "StatefulRandomBinomial", "StatefulStandardNormal", "StatefulStandardNormalV2", "StatefulTruncatedNormal",
        "StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt", "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal", "UniformCandidateSampler",
    }
)  # fmt: skip
_PACKAGES = os.path.dirname(os.path.dirname(tf.__file__))
_LIBRARIES = tuple(os.path.join(_PACKAGES, name, "") for name in ("tensorflow", "keras"))


class Found(NamedTuple):
    """An operation with a random state of its own.

    Attributes:
      name: without the tower's.
      type: of TYPES.
      line: of the program that made it, FILE:LINE.
    """

    name: str
    type: str
    line: str

    def __str__(self) -> str:
        return f"{self.name} ({self.type}, {self.line})"

    @property
    def instead(self) -> str:
        """The function of tower_train that draws likewise, but by example."""
        if "Dataset" in self.name or self.name.startswith("preprocess/"):
            return "the draws that `augment` is given"
        if "dropout" in self.name:
            return "tower_train.layers.dropout"
        return "tower_train.layers.random_normal" if "Normal" in self.type else "tower_train.layers.random_uniform"


def check(workload: str, last: Sequence[tf.Operation], is_allowed: bool) -> list[str]:
    """Looks for operations with random states of their own, by which a tower or its input is computed.

    Args:
      workload: its name.
      last: the final operations of the tower and its input.
      is_allowed: --allow_stateful_random.

    Returns:
      Those found, in words.

    Raises:
      GraphError: there is one, and it is not allowed.
      ConfigError: there is none, but it is allowed.
    """
    stateful = list(find(last))
    if is_allowed and not stateful:
        raise errors.ConfigError(
            f"--allow_stateful_random: workload {workload} has no operation with a random state of its own. Leave the "
            "option out."
        )
    if stateful and not is_allowed:
        more = f" and {len(stateful) - 1} more" if len(stateful) > 1 else ""
        raise errors.GraphError(
            f"workload {workload}: {stateful[0]}{more} would keep a random state of its own, so that results would "
            f"depend on the number of towers and on resuming. Use {stateful[0].instead}, or --allow_stateful_random to "
            "train all the same."
        )
    return [str(each) for each in stateful]


def find(last: Sequence[tf.Operation]) -> Iterator[Found]:
    """Yields the operations with a random state on which the last ones depend, in the order of their creation.

    One that calls functions is yielded for each such type in them. Initial values of variables are not included: what
    is computed from a variable depends on its handle only.
    """
    graph, needed = last[0].graph, {op.name for op in _ancestors(last)}
    definition = graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in definition.library.function}
    for node in definition.node:
        for each in sorted(set(_types(node, bodies, set()))) if node.name in needed else ():
            line = _line_of(graph.get_operation_by_name(node.name))
            yield Found(node.name.partition("/")[2] or node.name, each, line)


def _ancestors(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations and all that they depend on."""
    reached, left = set(), list(operations)
    while left:
        op = left.pop()
        if op not in reached:
            reached.add(op)
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return reached


def _types(node, bodies: dict[str, Sequence], seen: set[str]) -> Iterator[str]:
    """Yields the types by which a node draws: its own, and those within the functions that it calls."""
    if node.op in TYPES and _draws(node):
        yield node.op
    for attr in node.attr.values():
        for name in {attr.func.name, *(function.name for function in attr.list.func)} - seen:
            seen.add(name)
            for inner in bodies.get(name, ()):
                yield from _types(inner, bodies, seen)


def _draws(node) -> bool:
    """Returns False for an operation of these types that is told not to draw."""
    return not node.attr["deterministic"].b and ("dropout" not in node.attr or node.attr["dropout"].f > 0)


def _line_of(op: tf.Operation) -> str:
    """Returns the innermost line that made an operation and is not TensorFlow's or Keras' own."""
    lines = [(frame.filename, frame.lineno) for frame in op.traceback]
    outside = [line for line in lines if not line[0].startswith(_LIBRARIES)] or lines
    return f"{os.path.basename(outside[-1][0])}:{outside[-1][1]}"
