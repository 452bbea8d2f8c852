"""The session that training runs in, and one step in it."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train.cluster.membership import Membership
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run import input_stream
from tower_train.run.hooks import UserHooks

v1 = tf.compat.v1


@contextlib.contextmanager
def open_session(
    graph: TrainingGraph, membership: Membership, last_step: int, restore: Callable[[v1.Session], None] | None
) -> Iterator[v1.Session]:
    """Opens a session in which the variables have the chief's values and the stream is at its position.

    The chief's values come from `restore`, or are the initial ones. Each worker has its own position in a stream that
    has a state.

    Args:
      graph: the default one, which is final from now on.
      membership: of this worker; frees a step by closing the session.
      last_step: of the run, which the stream must have examples for.
      restore: sets all variables from a checkpoint; None for initial values.

    Raises:
      DataError, RunError: as input_stream.begin.
    """
    local_initializer = tf.group(v1.local_variables_initializer(), v1.tables_initializer(), graph.stream.initializer)
    v1.get_default_graph().finalize()
    session = v1.Session(membership.target, config=membership.devices.session_config)
    try:
        membership.session_opened(session)
        if restore:
            restore(session)
        elif membership.task.is_chief:
            session.run([variable.initializer for variable in graph.saved.variables])
        if graph.saved.broadcast is not None:
            if graph.stream.state and membership.task.is_chief:
                input_stream.hand_out(session, graph.stream.state, membership.board)
            session.run(graph.saved.broadcast)
            if graph.stream.state and not membership.task.is_chief:
                input_stream.fetch(session, graph.stream.state, membership.board)
        # After that, so that the stream starts at the restored position and copies have the restored values.
        session.run(local_initializer)
        if graph.stream.state:
            input_stream.begin(session, graph, last_step)
        yield session
    finally:
        with contextlib.suppress(tf.errors.AbortedError, tf.errors.UnavailableError):  # of a lost worker
            session.close()


def one_step(
    session: v1.Session, graph: TrainingGraph, user_hooks: UserHooks, is_summary_due: Callable[[int], bool]
) -> Callable[[int], StepReport]:
    """Returns a function that does a step, of a number, and returns its report in numpy values.

    Without users' hooks TensorFlow is called directly, which takes a fifth of the time of Session.run.
    """
    report, with_summary = graph.report, graph.report._replace(summary=graph.summary)
    if user_hooks:
        return lambda step: user_hooks.run(session, graph.train_op, with_summary if is_summary_due(step) else report)
    plain_step = session.make_callable((graph.train_op, report))
    summarized_step = session.make_callable((graph.train_op, with_summary)) if graph.summary is not None else None

    def run(step):
        try:
            return (summarized_step if is_summary_due(step) else plain_step)()[1]
        except tf.errors.OpError as error:
            raise _located(error, graph.graph) from None

    return run


def _located(error: tf.errors.OpError, graph: tf.Graph) -> tf.errors.OpError:
    """Returns an error with the operation that its message names, as Session.run raises it."""
    name = re.search(r"\{\{node ([^}]+)\}\}", error.message)
    try:
        op = graph.get_operation_by_name(name[1]) if name else None
    except KeyError:  # of a function
        op = None
    return type(error)(op and op.node_def, op, error.message)
