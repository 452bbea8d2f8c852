"""The input of a run: its options, and its position in a checkpoint.

With several workers each has a position of its own, which the chief saves: the others send theirs after each step that
is saved, and get them back when the run is resumed.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.board import Board
from tower_train.graph import elements
from tower_train.graph.elements import IteratorState
from tower_train.graph.record import TrainingGraph
from tower_train.run.actions import Action
from tower_train.workload import Examples

v1 = tf.compat.v1


def check_options(examples: Examples, dump_bad_batch: bool, elastic: str | None) -> None:
    """Raises ConfigError for an option that these examples cannot serve."""
    if elastic and examples.elements:
        raise errors.ConfigError(
            f"--elastic={elastic}: {examples.name} comes in an order of its own, in which each worker has a place that "
            "no other number of workers can go on from. Leave the option out, or fetch the data by index."
        )
    if dump_bad_batch and examples.elements:
        raise errors.ConfigError(
            f"--dump_bad_batch: {examples.name} comes in its own order, from which no batch can be made again. Leave "
            "the option out."
        )


def begins_anew(graph: TrainingGraph, path: str, saved: Sequence[str], on_worker_change: str) -> bool:
    """Returns whether a checkpoint's positions are of another number of workers, so that none is used.

    Args:
      graph: the graph that resumes from it.
      path: of the checkpoint.
      saved: the names of its variables.
      on_worker_change: the option.

    Raises:
      RunError: they are, and on_worker_change refuses that.
    """
    saved_by = set(filter(None, map(elements.saved_by, saved))) if graph.stream.state else set()
    if not saved_by or graph.layout.num_workers in saved_by:
        return False
    if on_worker_change == "refuse":
        raise errors.RunError(
            f"{path}: workers were {max(saved_by)}, now {graph.layout.num_workers}, and it holds their old positions "
            f"in {graph.examples.name}. Go on with as many, or give --on_worker_change=next_epoch, which leaves out "
            "the rest of the current epoch."
        )
    return True


def save(session: v1.Session, state: IteratorState, board: Board | None, step: int) -> None:
    """Writes all workers' positions after a step into their variables, in the chief."""
    session.run(state.note)
    if board:
        _put(session, state.variables[1:], board.collect(step))


def hand_out(session: v1.Session, state: IteratorState, board: Board) -> None:
    """Sends the other workers the positions in their variables, from the chief."""
    board.hand_out(session.run(state.variables))


def fetch(session: v1.Session, state: IteratorState, board: Board) -> None:
    """Puts the position from the chief into this worker's variable."""
    session.run([variable.initializer for variable in state.variables])
    _put(session, [state.variables[state.worker]], [board.fetch()])


def _put(session: v1.Session, variables: Sequence[tf.Variable], values: Sequence[bytes]) -> None:
    for variable, value in zip(variables, values, strict=True):
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def begin(session: v1.Session, graph: TrainingGraph, last_step: int) -> None:
    """Moves a graph's iterator to the checkpoint's position, and makes sure that its state can be saved.

    Raises:
      DataError: the dataset is too short for the steps, or its state cannot be saved.
      RunError: it cannot be moved to that position.
    """
    state, name = graph.stream.state, graph.examples.name
    length, needed = int(session.run(state.length)), last_step * graph.layout.global_batch
    if 0 <= length < needed:
        raise errors.DataError(
            f"{name}: its dataset ends after {length} examples, and this run takes {needed}. Make it endless with "
            ".repeat()."
        )
    try:
        session.run(state.resume)
    except tf.errors.OpError as error:
        raise errors.RunError(
            f"{name}: its dataset cannot be put where the checkpoint says ({errors.reason(error)}). Make it by the "
            "same steps as when the run began, or give another --train_dir."
        ) from None
    try:
        session.run(state.note)
    except tf.errors.OpError as error:
        raise errors.DataError(
            f"{name}: its dataset cannot be saved in a checkpoint ({errors.reason(error)}), so no run on it could be "
            "resumed. tf.data saves neither Python generators and functions nor stateful operations: use "
            "tf.random.stateless_* and the like, or data that is fetched by index."
        ) from None


class SendPosition(Action):
    """Sends a worker's position to the chief after each step that the chief saves, and after the last one.

    Args:
      session: with a graph that has a stream_state.
      graph: this one.
      board: takes them.
      is_saved: step -> whether the chief saves after it unasked.
      steps_done: number of earlier steps, which the chief has saved.
    """

    def __init__(
        self, session: v1.Session, graph: TrainingGraph, board: Board, is_saved: Callable[[int], bool],
        steps_done: int,
    ):  # fmt: skip
        self._session, self._state, self._board = session, graph.stream.state, board
        self._is_saved, self._sent_step = is_saved, steps_done or None

    def __call__(self, step, report):
        if report.saving > 0 or self._is_saved(step):
            self._send(step)

    def end(self, step):
        if step != self._sent_step:
            self._send(step)

    def _send(self, step: int) -> None:
        self._session.run(self._state.note)
        self._board.send(step, self._session.run(self._state.variables[self._state.worker]))
        self._sent_step = step
