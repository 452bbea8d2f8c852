"""One line about a step that fails, instead of TensorFlow's pages."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples

# Of tf.nn.sparse_softmax_cross_entropy_with_logits, and of tf.gather as in classification_metrics.
_LABELS = re.compile(r"Received a label value of |indices\[.* is not in \[0")

_UNEQUAL = re.compile("Cannot batch tensors with different shapes|Incompatible shapes during merge|others give")


@contextlib.contextmanager
def explained(
    examples: Examples,
    workload: str,
    may_end: bool = False,
    tower_batch: int | None = None,
    accumulate_steps: int | None = None,
    batch: Callable[[], str] = lambda: "",
    graph: tf.Graph | None = None,
) -> Iterator[None]:
    """Converts the failure of a graph's input, of a tower on it, of an allocation, of NCCL, or of the choice of
    kernels, into one line.

    Args:
      examples: the input.
      workload: its name.
      may_end: leave OutOfRangeError as it is.
      tower_batch: examples that a tower has at a time, to tell what to try; None if no tower computes.
      accumulate_steps: batches of a tower and step in training.
      batch: describes the examples of the step under way.
      graph: of the step; None for the default one of now.

    Raises:
      DataError: the input failed within this block.
      GraphError: a tower's operation does not fit its input, or has no kernel that --deterministic may use.
      RunError: there was too little memory; or NCCL failed.
    """
    graph = graph or tf.compat.v1.get_default_graph()
    try:
        yield
    except tf.errors.OutOfRangeError:
        if may_end:
            raise
        raise errors.DataError(
            f"{examples.name}: its dataset ended before the last step. Make it endless with .repeat()."
        ) from None
    except tf.errors.ResourceExhaustedError as error:
        if tower_batch is None:
            raise
        advice = _memory_advice(tower_batch, accumulate_steps)
        raise errors.RunError(f"Out of memory: {_allocation(error.message)}. {advice}") from error
    except tf.errors.UnimplementedError as error:
        if "determinis" not in error.message.lower():
            raise
        raise _without_kernel(error, _operation(error, graph)) from error
    except tf.errors.OpError as error:
        if "NCCL" in error.message and not isinstance(error, tf.errors.InvalidArgumentError):
            raise _of_nccl(error) from error
        op = _operation(error, graph)
        is_of_tower = op is not None and op.name.startswith("tower_")
        if is_of_tower and isinstance(error, tf.errors.InvalidArgumentError):
            raise _of_tower(op, _why(error), workload, examples.name, batch()) from error
        if is_of_tower or "IteratorGetNext" not in error.message:
            raise
        why = examples.fault() or _why(error)
        advice = " Fill them up to one shape, or cut them." if _UNEQUAL.search(why) else ""
        raise errors.DataError(f"{examples.name}: the input failed: {why}.{advice}") from error


def _without_kernel(error: tf.errors.UnimplementedError, op: tf.Operation | None) -> errors.GraphError:
    which = f"{op.name} ({op.type})" if op else "an operation"
    return errors.GraphError(
        f"--deterministic: {which} has no kernel on its device that repeats to the bit ({errors.reason(error)}). "
        "Leave the option out, or use another operation."
    )


def _of_nccl(error: tf.errors.OpError) -> errors.RunError:
    return errors.RunError(
        f"NCCL cannot average between these GPUs ({errors.reason(error)}). In a container /dev/shm may be too small "
        "(docker run --shm-size=1g); NCCL_DEBUG=WARN says more. Or train with --all_reduce=collective."
    )


def _of_tower(op: tf.Operation, why: str, workload: str, data: str, batch: str) -> errors.GraphError:
    advice = " Has a label no output? There must be one for each class." if _LABELS.search(why) else ""
    where = f" ({batch})" if batch else ""
    return errors.GraphError(f"workload {workload}: {op.name} fails on examples of {data}{where}: {why}.{advice}")


def _operation(error: tf.errors.OpError, graph: tf.Graph) -> tf.Operation | None:
    """Returns the operation at fault, which errors of a session's callable have in their message only."""
    name = re.search(r"\{\{node ([^}]+)\}\}", error.message)
    try:
        return error.op or (name and graph.get_operation_by_name(name[1]))
    except KeyError:  # of a function
        return None


def _why(error: tf.errors.OpError) -> str:
    """Returns the reason of an operation or an input function, without the names of transformations around it."""
    roots = re.findall(r"^ *\(0\) [A-Z_]+: *(.*)$", error.message, re.MULTILINE)
    reason = roots[0] if roots else errors.reason(error)
    reason = re.sub(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ", "", reason)
    reason = re.sub(r"  Label values:.*", "", reason)
    reason = re.sub(r"^\w+Error: ", "", reason).rstrip(".")  # of a Python function
    return re.sub(r"^assertion failed: \[(.*)\]$", lambda failed: failed[1].replace("] [", " "), reason)


def _memory_advice(batch_size: int, accumulate_steps: int | None) -> str:
    if batch_size == 1:
        return "Free memory, or train a smaller network."
    text = f"A tower has {batch_size} examples at a time: try --batch_size={batch_size // 2}"
    if accumulate_steps:
        text += f"; with --accumulate_steps={2 * accumulate_steps} a step has as many as before"
    return text + "."


def _allocation(message: str) -> str:
    found = re.search(r"shape\s*(\[[\d,]*\]) and type (\w+) on \S*device:(\w+:\d+)", message)
    return f"a {found[2]} tensor {found[1]} has no place on {found[3]}" if found else message.splitlines()[0][:200]
