"""One line about a step that fails, instead of TensorFlow's pages."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors

# Of tf.nn.sparse_softmax_cross_entropy_with_logits, and of tf.gather as in classification_metrics.
_LABELS = re.compile(r"Received a label value of |indices\[.* is not in \[0")

_UNEQUAL = re.compile("Cannot batch tensors with different shapes|Incompatible shapes during merge|others give")


@contextlib.contextmanager
def explained(
    name: str,
    workload: str,
    may_end: bool = False,
    batch: Callable[[], str] = lambda: "",
    graph: tf.Graph | None = None,
    fault: Callable[[], str | None] = lambda: None,
) -> Iterator[None]:
    """Converts the failure of a graph's input, of a tower on it, or of the choice of kernels, into one line.

    Args:
      name: of the examples.
      workload: its name.
      may_end: leave OutOfRangeError as it is.
      batch: describes the examples of the step under way.
      graph: of the step; None for the default one of now.
      fault: finds what is wrong with the examples, see Examples.fault.

    Raises:
      DataError: the input failed within this block.
      GraphError: a tower's operation does not fit its input, or has no kernel that --deterministic may use.
    """
    graph = graph or tf.compat.v1.get_default_graph()
    try:
        yield
    except tf.errors.OutOfRangeError:
        if may_end:
            raise
        raise errors.DataError(
            f"{name}: its dataset ended before the last step. Make it endless with .repeat()."
        ) from None
    except tf.errors.ResourceExhaustedError:  # see out_of_memory.py
        raise
    except tf.errors.UnimplementedError as error:
        if "determinis" not in error.message.lower():
            raise
        op = _operation(error, graph)
        which = f"{op.name} ({op.type})" if op else "an operation"
        raise errors.GraphError(
            f"--deterministic: {which} has no kernel on its device that repeats to the bit ({errors.reason(error)}). "
            "Leave the option out, or use another operation."
        ) from error
    except tf.errors.OpError as error:
        op = _operation(error, graph)
        is_of_tower = op is not None and op.name.startswith("tower_")
        if is_of_tower and isinstance(error, tf.errors.InvalidArgumentError):
            why = _why(error)
            advice = " Has a label no output? There must be one for each class." if _LABELS.search(why) else ""
            which = f" ({positions})" if (positions := batch()) else ""
            raise errors.GraphError(
                f"workload {workload}: {op.name} fails on examples of {name}{which}: {why}.{advice}"
            ) from error
        if is_of_tower or "IteratorGetNext" not in error.message:
            raise
        why = fault() or _why(error)
        advice = " Fill them up to one shape, or cut them." if _UNEQUAL.search(why) else ""
        raise errors.DataError(f"{name}: the input failed: {why}.{advice}") from error


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
