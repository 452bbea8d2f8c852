"""What a run does about its input: restoring its place, and one line where it fails."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph.record import TrainingGraph
from tower_train.run_dir import checkpoint
from tower_train.workload import Examples

v1 = tf.compat.v1


def check_options(examples: Examples, config: Config) -> None:
    """Raises ConfigError for an option that these examples cannot serve."""
    if config.dump_bad_batch and examples.elements:
        raise errors.ConfigError(
            f"--dump_bad_batch: {examples.name} comes in an order of its own, so that no batch can be made again from "
            "its place. Leave the option out."
        )


class StateHook(v1.train.SessionRunHook):
    """Puts an iterator where the checkpoint says, once it is initialised, and makes sure that its state can be saved
    before a step is done."""

    def __init__(self, graph: TrainingGraph, last_step: int):
        """Args: a graph with a stream_state; the step that the run goes to."""
        self._state, self._name = graph.stream_state, graph.data
        self._needed = last_step * graph.global_batch

    def after_create_session(self, session, coord):
        length = int(session.run(self._state.length))
        if 0 <= length < self._needed:
            raise errors.DataError(
                f"{self._name}: its dataset ends after {length} examples, and this run takes {self._needed}. "
                "Make it endless with .repeat()."
            )
        try:
            session.run(self._state.resume)
        except tf.errors.OpError as error:
            raise errors.RunError(
                f"{self._name}: its dataset cannot be put where the checkpoint says ({checkpoint.reason(error)}). Make "
                "it by the same steps as when the run began, or give another --train_dir."
            ) from None
        try:
            session.run(self._state.note)
        except tf.errors.OpError as error:
            raise errors.DataError(
                f"{self._name}: its dataset cannot be saved in a checkpoint ({checkpoint.reason(error)}), so no run on "
                "it could be resumed. tf.data saves neither Python generators and functions nor stateful operations: "
                "use tf.random.stateless_* and the like, or data that is fetched by index."
            ) from None


@contextlib.contextmanager
def failures_named(name: str, may_end: bool = False) -> Iterator[None]:
    """Turns what fails in the input of a graph into one line.

    Args:
      name: what the data is called.
      may_end: leave OutOfRangeError, the end of the data, as it is.

    Raises:
      DataError: an error within this block came from the input.
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
        if "IteratorGetNext" not in error.message:
            raise
        raise errors.DataError(f"{name}: the input failed: {_why(error)}.") from error


def _why(error: tf.errors.OpError) -> str:
    """The reason that an input function gave, without the transformations that TensorFlow passed it through."""
    roots = re.findall(r"^ *\(0\) [A-Z_]+: *(.*)$", error.message, re.MULTILINE)
    reason = roots[0] if roots else checkpoint.reason(error)
    reason = re.sub(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ", "", reason)
    return re.sub(r"^\w+Error: ", "", reason).rstrip(".")  # of a Python function
