"""The session that training runs in."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.cluster.single_process import SingleProcess
from tower_train.graph.record import TrainingGraph
from tower_train.run import input_stream

v1 = tf.compat.v1


def open_session(
    graph: TrainingGraph,
    membership: SingleProcess,
    session_hooks: Sequence[v1.train.SessionRunHook],
    restore: Callable[[v1.Session], None] | None,
    start_timeout_secs: float,
) -> v1.train.SingularMonitoredSession:
    """Opens a session in which the variables have the chief's values and the stream is at its position.

    The chief's values come from `restore`, or are the initial ones. Each worker has its own position in a stream that
    has a state.

    Raises:
      WorkerError: opening takes longer than start_timeout_secs.
    """

    local_initializer = tf.group(v1.local_variables_initializer(), v1.tables_initializer(), graph.stream_initializer)

    def initialize(_, session):
        membership.session_opened(session)
        if restore:
            restore(session)
        elif membership.task.is_chief:
            session.run([variable.initializer for variable in graph.variables])
        if graph.broadcast is not None:
            if graph.stream_state and membership.task.is_chief:
                input_stream.hand_out(session, graph.stream_state, membership.states)
            session.run(graph.broadcast)
            if graph.stream_state and not membership.task.is_chief:
                input_stream.fetch(session, graph.stream_state, membership.states)
        # After that, so that the stream starts at the restored position and copies have the restored values.
        session.run(local_initializer)

    # Not one that reopens itself after an error, with older variables.
    return v1.train.SingularMonitoredSession(
        [membership, *session_hooks], _Scaffold(init_fn=initialize), membership.target,
        membership.devices.session_config,
    )  # fmt: skip


class _Scaffold(v1.train.Scaffold):
    """Finalizes the graph, and leaves all else to init_fn.

    TensorFlow's own would add operations that look whether variables have values, and run them. For each such run the
    session prepares the whole graph, which of many towers takes long.
    """

    def finalize(self):
        if not v1.get_collection(v1.GraphKeys.SAVERS):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())  # a CheckpointSaverHook of the user's needs one
        v1.get_default_graph().finalize()
        return self
