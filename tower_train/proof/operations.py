"""Small trainings on the host, and the first operation whose values differ in one with several towers, with its cause.

A tensor of one tower corresponds to those of the same name in the towers. Rules of arithmetic say how they may differ:
rows one after the other, a mean or a sum over the batch, what is the same for all examples. The first operation outside
of these rules is the one to look at.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train.config import Config
from tower_train.examples import Examples
from tower_train.graph import devices
from tower_train.graph.random_state import ancestors, source_line
from tower_train.graph.step_plan import plan_step
from tower_train.graph.training import build_step, opened
from tower_train.proof.comparison import LOSS, STEPS, Arrays, Values, wide
from tower_train.workload import Workload

v1 = tf.compat.v1
_MOST_MS = 600_000  # of a step: towers may wait for a mean that some do not take
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_REDUCTIONS = frozenset(
    "All Any Cumsum EuclideanNorm FusedBatchNormV3 L2Loss LogSoftmax LogSumExp Max Mean Min Prod Softmax Sum TopKV2 "
    "Unique".split()
)
_KEEPING = ("LookupTable", "Queue", "Stack", "OrderedMap", "Barrier", "Stage", "Unstage")
_CALLS_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_UNFETCHABLE = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "RefSwitch", "RefMerge"})
_DRAWING = ("stateful", "stateless", "python")  # kinds, of numbers that need not depend on those of the batch
SAME, _ROWS, _SHARE, MEAN, SUM = "same", "rows", "rows over the number of towers", "mean", "sum"


class Trial:
    """A training graph on logical CPU devices, and what is compared of it."""

    def __init__(self, workload: Workload, examples: Examples, config: Config):
        placed = devices.place(config, gpus_here=[])
        self.built = build_step(plan_step(workload, examples, config, placed))
        self.towers = self.built.layout.num_towers  # the batches of a step
        # It takes longer than a few steps save by it; XLA needs it on several CPUs.
        is_optimized = config.jit_compile == "always"
        placed.session_config.graph_options.rewrite_options.disable_meta_optimizer = not is_optimized
        placed.session_config.operation_timeout_in_ms = _MOST_MS
        saved = {v.op.name: v for v in self.built.saved.variables if v.dtype.base_dtype != tf.string}
        self.weights = {name: variable for name, variable in saved.items() if variable.trainable}  # that are trained
        with self.built.graph.as_default(), tf.device(devices.HOST):
            self._assign = setter(saved)
            gradients = {name: tf.convert_to_tensor(each) for name, each in self.built.compared.gradients.items()}
            with tf.control_dependencies([self.built.train_op]):
                after = {name: variable.read_value() for name, variable in saved.items()}
        self._before, self._after = saved, Values({LOSS: self.built.report.loss}, gradients, after)

    @contextlib.contextmanager
    def session(self, begin: Arrays) -> Iterator[v1.Session]:
        """Opens a session. begin: values of variables; others have initial ones, at step 0."""

        def set_variables(session: v1.Session) -> None:
            session.run([variable.initializer for variable in self.built.saved.variables])
            self._assign(session, begin)

        with opened(self.built, set_variables) as session:
            yield session

    def train(self, begin: Arrays) -> Iterator[Values]:
        """Does the steps of a comparison, as its `Training`."""
        with self.session(begin) as session:
            yield Values({}, {}, session.run(self._before))
            for _ in range(STEPS):
                yield session.run(self._after)


def setter(variables: Mapping[str, tf.Variable]) -> Callable[[v1.Session, Arrays], None]:
    """Adds assignments to the current graph; returns a function that gives variables values in a session."""
    holders = {name: v1.placeholder(variable.dtype.base_dtype) for name, variable in variables.items()}
    assigns = {name: v1.assign(variables[name], holder, validate_shape=False) for name, holder in holders.items()}

    def assign(session: v1.Session, values: Arrays) -> None:
        session.run([assigns[name] for name in values], {holders[name]: value for name, value in values.items()})

    return assign


def first_difference(
    one: Trial, many: Trial, steps: int, tolerance: float, resumed: Arrays | None = None
) -> str | None:
    """Does steps with one tower and with any number of towers until an operation differs; names the first that does.

    Args:
      steps: at most so many.
      tolerance: relative, of tensors that count as equal.
      resumed: the variables after the first step, from which the other session goes on; None for initial ones in both.
    """
    ops = list(_operations(one, many))
    with one.session({}) as first, many.session(resumed or {}) as others:
        if resumed is not None:
            first.run(one.built.train_op)
        for _ in range(steps):
            whole = first.run([one.built.train_op, [[tensor] for tensor, _ in ops]])[1]
            parts = others.run([many.built.train_op, [tensors for _, tensors in ops]])[1]
            seen = _Relations(one, many.towers, tolerance)
            for (tensor, _), (value,), by_tower in zip(ops, whole, parts, strict=True):
                if culprit := seen.look(tensor, value, by_tower):
                    return culprit
    return None


def _is_exact(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_integer or tensor.dtype.is_bool  # as of Keras' argmax, which looks at float32


def least_exact(losses: Sequence[tf.Tensor], weights: Collection[tf.Operation]) -> tf.Tensor:
    """Returns the tensor of the least exact dtype on the way from weights to losses.

    Args:
      losses: of one graph.
      weights: the operations that hold them.
    """
    ops = losses[0].graph.get_operations()  # in the order of their creation, so after their inputs
    before, reached, tensors = {loss.op for loss in losses}, set(weights), list(losses)
    for op in reversed(ops):
        if op in before:
            before.update(tensor.op for tensor in op.inputs if not _is_exact(tensor))
    for op in ops:
        if op in before and any(tensor.op in reached and not _is_exact(tensor) for tensor in op.inputs):
            reached.add(op)
            tensors += [tensor for tensor in op.outputs if tensor.dtype.is_floating]
    return min(tensors, key=lambda tensor: (tensor.dtype.size, tensor.dtype == tf.float16))


def assigning(trial: Trial, variable: str) -> str | None:
    """Names the operation of tower 0 that assigns a variable; None if there is none."""
    if (value := trial.built.compared.assigned.get(variable)) is not None:
        return _assigned(variable, value.op)
    handles = [v.handle for v in trial.built.saved.variables if v.op.name == variable]
    return next((_named(op, "state") for handle in handles for op in _assigning(handle)), None)


def _assigning(handle: tf.Tensor) -> list[tf.Operation]:
    """Returns the operations of tower 0 that assign a variable; else its branches, loops and functions with it."""
    ops = [op for op in handle.consumers() if op.name.startswith("tower_0/")]
    plain = [op for op in ops if "Assign" in op.type or op.type.startswith("ResourceScatter")]
    return plain or [op for op in ops if op.type in ("If", "While", "StatefulPartitionedCall")]


def _operations(one: Trial, many: Trial) -> Iterator[tuple[tf.Tensor, list[tf.Tensor]]]:
    """Yields each output of one tower's operations, and those of the same name of several towers."""
    graph, others = one.built.graph, many.built.graph
    needed = ancestors([one.built.train_op])
    for op in graph.get_operations():
        is_in_control_flow = op._get_control_flow_context() is not None  # of version 1: its tensors may be dead
        is_fetchable = not is_in_control_flow and op.type not in _UNFETCHABLE and graph.is_fetchable(op)
        if not op.name.startswith("tower_0/") or op not in needed or not is_fetchable:
            continue
        try:  # of a gradient, the tower's name stands twice in it
            names = [op.name.replace("tower_0/", f"tower_{i}/") for i in range(many.towers)]
            counterparts = list(map(others.get_operation_by_name, names))
        except KeyError:
            continue
        for i, output in enumerate(op.outputs):
            if output.dtype not in (tf.resource, tf.variant):
                yield output, [counterpart.outputs[i] for counterpart in counterparts]


def relation(
    whole: np.ndarray, parts: Sequence[np.ndarray], tolerance: float, axes: Sequence[int] | None = None
) -> str | None:
    """Returns how one tower's tensor and the towers' agree, up to a relative tolerance; None if they do not.

    axes: by which the towers' may be joined; None for any.
    """
    towers = len(parts)

    def equal(one: np.ndarray, other: np.ndarray) -> bool:
        if one.shape != other.shape:
            return False
        if one.dtype.kind not in "fc":
            return bool((one == other).all())
        one, other = wide(one), wide(other)
        limit = tolerance * np.abs(one[np.isfinite(one)]).max(initial=0)
        return bool(np.allclose(one, other, rtol=0, atol=limit, equal_nan=True))

    def joined() -> Iterator[np.ndarray]:
        for axis in range(whole.ndim) if axes is None else axes[: whole.ndim]:
            if len({part.shape[:axis] + part.shape[axis + 1 :] for part in parts}) == 1:
                yield np.concatenate(parts, axis=axis)

    if all(equal(whole, part) for part in parts):
        return SAME
    if any(equal(whole, each) for each in joined()):
        return _ROWS
    if whole.dtype.kind not in "fc":
        return None
    if any(equal(whole * towers, each) for each in joined()):  # gradients of a mean
        return _SHARE
    if any(part.shape != whole.shape for part in parts):
        return None
    mean = np.mean([wide(part) for part in parts], axis=0)
    if equal(whole, mean) or equal(whole * towers, mean):
        return MEAN
    if equal(whole, mean * towers):
        return SUM
    return SAME if all(equal(whole * towers, part) for part in parts) else None


class _Relations:
    """The relation between one tower's tensors and those of several, as operations are looked at in their order."""

    def __init__(self, one: Trial, towers: int, tolerance: float):
        compared = one.built.compared
        self._towers, self._tolerance, self._loss = towers, tolerance, compared.losses[0].name
        self._assigned = {value.op: name for name, value in compared.assigned.items()}
        self._of: dict[str, str | None] = {}  # {tensor's name: its relation}
        self._shape_ops: set[tf.Operation] = set()

    def look(self, tensor: tf.Tensor, whole: np.ndarray, parts: Sequence[np.ndarray]) -> str | None:
        """Names the culprit if this tensor is the first that breaks the rules."""
        op, whole, parts = tensor.op, np.asarray(whole), list(map(np.asarray, parts))
        if self._is_about_shapes(op):
            return None
        found = self._of[tensor.name] = relation(whole, parts, self._tolerance)
        if tensor.name == self._loss and found == SUM:
            return _named(op, "sum")
        if _kind(op) == "state" and found != SAME:
            return next((_named(each, "state") for each in _assigning(op.inputs[0])), _named(op, "copies"))
        # Whole numbers also are sizes and positions.
        is_number = whole.dtype.kind in "fc" or self._towers == 1 or _kind(op) in _DRAWING
        return None if found or not is_number else self._culprit(op)

    def _is_about_shapes(self, op: tf.Operation) -> bool:
        """Returns whether an operation is computed from the sizes of tensors only."""
        sources = [tensor.op for tensor in op.inputs if tensor.op.type != "Const"]
        reads_shapes_only = bool(sources) and all(source in self._shape_ops for source in sources)
        if op.type in _SHAPES or (reads_shapes_only and _kind(op) not in _DRAWING):
            self._shape_ops.add(op)
        return op in self._shape_ops

    def _culprit(self, op: tf.Operation) -> str:
        """Names an operation, or the variable, the reduction over the batch or its size, whose result it uses."""
        while op.type == "Identity":
            op = op.inputs[0].op
        if assigns := [each for t in op.inputs if t.dtype == tf.resource for each in _assigning(t)]:
            return _named(assigns[0], "state")
        first, is_reduced = op, False
        while reduced := [t.op for t in op.inputs if self._of.get(t.name) in (_SHARE, MEAN, SUM) and _is_forward(op)]:
            op, is_reduced = min(reduced, key=_is_size), True  # rather what is computed than the size itself
        if values := [tensor.op for tensor in op.inputs if tensor.op in self._assigned]:
            return _assigned(self._assigned[values[0]], values[0])
        if is_reduced or _kind(op) == "reduction":
            for value, variable in self._assigned.items():
                if op in ancestors([value]) and (first is op or value in ancestors([first])):  # else beside the network
                    return _assigned(variable, op, "read")
        return _named(op, ("size" if _is_size(op) else "reduction") if is_reduced else _kind(op))


def _is_size(op: tf.Operation) -> bool:
    return all(each.type == "Const" for each in ancestors([op]) if not each.inputs)


def _is_forward(op: tf.Operation) -> bool:
    return not op.name.startswith("tower_0/gradients/")


def _assigned(variable: str, value: tf.Operation, kind: str = "assigned") -> str:
    return f"{variable} (assigned, {source_line(value)}): {_CAUSES[kind]}"


def _named(op: tf.Operation, kind: str) -> str:
    return f"{op.name.replace('tower_0/', '')} ({op.type}, {source_line(op)}): {_CAUSES[kind]}"


_RULE = "docs/workloads.md#the-rule-of-means"
_CAUSES: Mapping[str, str] = {
    "stateful": "it draws from a random state of its own. Use tower_train.layers.dropout, random_uniform or "
    "random_normal, which draw by example",
    "stateless": "it draws numbers for the rows of a batch, and a tower's batch has others of them. Use "
    "tower_train.layers.random_uniform or random_normal, which draw by example",
    "python": "a Python function gives each tower other values: by what it computes over the examples of a batch, of "
    "which a tower has its own only, by random numbers, or by a state of its own. Compute them from each example "
    "alone, or in the workload's augment, by its draws",
    "constant": "Python computes this constant anew for each tower (numpy.random?). Compute it once, with a "
    "seed, outside of inference and loss, or draw it by tower_train.layers.random_uniform",
    "state": "each tower changes a variable in a way that is no plain assign, assign_add or assign_sub. Only these are "
    "done once a step for all towers: use one of them, outside of branches, loops and tf.function",
    "assigned": "it gets the mean over towers of the values that they assign, once a step. Let that be a mean over "
    "examples, or the same in every tower (a counter of steps, not of examples)",
    "read": "the network uses what it assigns to it in this step, and a tower has its own examples only. Read the "
    "variable before (tf.identity of it), and assign a mean over examples, such as of the largest value of each",
    "kept": "a table or a queue keeps it, which all towers fill and no checkpoint holds. Keep it in a variable, or "
    "fill the table before the training",
    "copies": "the towers' copies of this variable are no longer the same",
    "reduction": "it goes over the examples of a batch, and a tower has its own only. Compute what belongs to each "
    "example, and take the mean over the batch last, in the loss; for batch normalisation use "
    f"tower_train.layers.batch_normalization ({_RULE})",
    "size": "it is the number of examples in a batch, and a tower's batch is smaller. Take means over the batch, and "
    "let nothing else depend on its size",
    "gradient": "it is computed from a gradient and does not scale with it, and a tower's are larger, as means of "
    "fewer examples. Limit them by --clip_gradients",
    "sum": "the loss is a sum over the batch. Let it be the mean over its examples: tf.reduce_mean, or the sum divided "
    f"by their number ({_RULE})",
    "other": f"its values for an example depend on the other examples of the batch, or on the tower ({_RULE})",
}


def _kind(op: tf.Operation) -> str:
    """Returns the likely cause of a difference that begins at an operation, a key of _CAUSES."""
    if op.type in _CALLS_PYTHON:
        return "python"
    if any(word in op.type for word in ("Random", "Normal", "Multinomial")):
        return "stateless" if op.type.startswith("Stateless") else "stateful"
    if op.type == "Const":
        return "constant"
    if op.type.startswith(_KEEPING):
        return "kept"
    if "Assign" in op.type or op.type.startswith("ReadVariable"):
        return "state"
    if op.type in _REDUCTIONS:
        return "reduction"
    return "other" if _is_forward(op) else "gradient"
