"""The session that training runs in."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph.record import TrainingGraph
from tower_train.graph.session import opened
from tower_train.run.training import Training

v1 = tf.compat.v1


@contextlib.contextmanager
def open_session(training: Training) -> Iterator[v1.Session]:
    """Opens a session in which the variables have the chief's values and the stream is at this worker's position; a
    lost worker closes it, which frees a step. The graph is final from now on.

    Raises:
      DataError: the stream is too short for the steps, or its state cannot be saved.
      RunError: it cannot be moved to its position.
    """
    graph, membership, is_chief = training.graph, training.membership, training.plan.is_chief
    state = graph.stream.state

    def set_variables(session: v1.Session) -> None:
        # a hook that makes operations in each step would slow all down
        graph.graph.finalize()
        membership.session_opened(session)
        if training.restore:
            training.restore(session)
        elif is_chief:
            session.run([variable.initializer for variable in graph.saved.variables])
        if graph.saved.broadcast is not None:
            if state and is_chief:
                membership.store.hand_out(session.run(state.variables))
            session.run(graph.saved.broadcast)  # the checkpoint may be on the chief's disk only
            if state and not is_chief:  # each worker goes on with its own data
                session.run([variable.initializer for variable in state.variables])
                assign(session, [state.variables[state.worker]], [membership.store.fetch()])

    with opened(graph, set_variables, membership.target) as session:
        if state:  # else the stream has begun at `examples_seen`
            _begin_stream(session, graph, training.plan.last_step)
        yield session


def assign(session: v1.Session, variables: Sequence[tf.Variable], values: Sequence[bytes]) -> None:
    """Gives variables values; the graph may be final."""
    for variable, value in zip(variables, values, strict=True):
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _begin_stream(session: v1.Session, graph: TrainingGraph, last_step: int) -> None:
    """Moves a graph's iterator to the checkpoint's position, and makes sure that its state can be saved."""
    # before the first step: a run that cannot be saved should not train for hours
    state, name = graph.stream.state, graph.examples.name
    length, needed = int(session.run(state.length)), last_step * graph.layout.global_batch
    if 0 <= length < needed:
        raise errors.DataError(
            f"{name}: its dataset ends after {length} examples, and this run takes {needed}. Make it endless with "
            ".repeat()."
        )
    for op, kind, problem, advice in (
        (
            state.resume,
            errors.RunError,
            "cannot be put where the checkpoint says",
            "Make it by the same steps as when the run began, or give another --train_dir.",
        ),
        (
            state.write,
            errors.DataError,
            "cannot be saved in a checkpoint",
            "No such run is resumed: tf.data saves neither Python generators and functions nor stateful operations. "
            "Use tf.random.stateless_* and the like, or data that is fetched by index.",
        ),
    ):
        try:
            session.run(op)
        except tf.errors.OpError as error:
            raise kind(f"{name}: its dataset {problem} ({errors.reason(error)}). {advice}") from None
