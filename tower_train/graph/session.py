"""The session of a built step: the one way to open it, for a run and for everything that tries a few steps."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train.graph import gradients
from tower_train.graph.record import TrainingGraph

v1 = tf.compat.v1


@contextlib.contextmanager
def opened(
    built: TrainingGraph, set_variables: Callable[[v1.Session], None] | None = None, target: str = ""
) -> Iterator[v1.Session]:
    """Opens a session, ready for its first step.

    Args:
      built: fetching its report does a step.
      set_variables: gives all variables their values, such as a checkpoint's; None for initial ones.
      target: the server of this worker; empty for a process by itself.
    """
    with built.graph.as_default():
        others = tf.group(v1.local_variables_initializer(), v1.tables_initializer())
    # Not as the default session: a program may have the loop over the steps, and is not to find itself in this graph.
    session = v1.Session(target, built.graph, built.plan.session_config)
    try:
        if set_variables:
            set_variables(session)
        else:
            session.run([variable.initializer for variable in built.saved.variables])
        # After that, so that copies have the variables' values and the stream starts at the position that these tell.
        session.run(others)
        # by itself, as actions run it too: a session prepares, and XLA compiles, each set of fetches anew
        session.run(built.stream.initializer)
        yield session
    finally:
        with contextlib.suppress(tf.errors.AbortedError, tf.errors.UnavailableError):  # of a lost worker
            session.close()
        gradients.forget_functions(built.graph)
