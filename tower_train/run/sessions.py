"""The session that training runs in."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.cluster.member import Member
from tower_train.graph.record import TrainingGraph

v1 = tf.compat.v1


def opened(
    built: TrainingGraph,
    config: v1.ConfigProto,
    session_hooks: Sequence[v1.train.SessionRunHook],
    restore: Callable[[v1.Session], None] | None = None,
    me: Member | None = None,
):
    """Opens a session in which the variables have their values and the stream is at its place.

    Args:
      built: the graph.
      config: of the session of a process by itself.
      session_hooks: around each step.
      restore: what puts a checkpoint's values into all variables; None: they get their initial values.
      me: of a process among several: all then get the chief's values, and run on TensorFlow's server.
    """

    def initialize(_, session):
        if me:
            me.session_opened(session)
        if restore:
            restore(session)
        elif not me or me.place.is_chief:
            session.run([variable.initializer for variable in built.variables])
        if me:
            session.run(built.broadcast)

    scaffold = v1.train.Scaffold(
        init_op=tf.no_op(),  # initial values may be costly, and are not needed where there are others
        init_fn=initialize,
        # Runs after that, so that the stream starts at the restored position and copies have the restored values.
        local_init_op=tf.group(v1.local_variables_initializer(), v1.tables_initializer(), built.stream_initializer),
    )
    if not me:
        return v1.train.MonitoredSession(v1.train.ChiefSessionCreator(scaffold, config=config), session_hooks)
    # Not one that opens itself again where a worker was lost: it would go on with variables from before.
    return v1.train.SingularMonitoredSession([me, *session_hooks], scaffold, me.target, me.placed.session_config)
