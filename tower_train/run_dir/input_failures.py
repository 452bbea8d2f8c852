"""One line about a failing input, instead of TensorFlow's pages."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.run_dir import checkpoint


@contextlib.contextmanager
def named(name: str, may_end: bool = False) -> Iterator[None]:
    """Converts a failure of a graph's input, or a label that is no class, into one line.

    may_end: leave OutOfRangeError as it is.

    Raises:
      DataError: the input failed within this block.
    """
    try:
        yield
    except tf.errors.OutOfRangeError:
        if may_end:
            raise
        raise errors.DataError(
            f"{name}: its dataset ended before the last step. Make it endless with .repeat()."
        ) from None
    except tf.errors.OpError as error:
        if label := re.search(
            r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)", error.message
        ):
            raise errors.DataError(
                f"{name}: there is a label {label[1]}; the network knows {label[2]} classes, 0 to {int(label[2]) - 1}. "
                "Mend the labels or the network."
            ) from error
        if "IteratorGetNext" not in error.message:
            raise
        raise errors.DataError(f"{name}: the input failed: {_why(error)}.") from error


def _why(error: tf.errors.OpError) -> str:
    """The reason that an input function gave, without the transformations that TensorFlow passed it through."""
    roots = re.findall(r"^ *\(0\) [A-Z_]+: *(.*)$", error.message, re.MULTILINE)
    reason = roots[0] if roots else checkpoint.reason(error)
    reason = re.sub(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ", "", reason)
    return re.sub(r"^\w+Error: ", "", reason).rstrip(".")  # of a Python function
