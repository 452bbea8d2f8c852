"""Users' SessionRunHooks around each step, called as MonitoredSession calls them."""

from collections.abc import Sequence

import tensorflow as tf

v1 = tf.compat.v1


class UserHooks:
    """The hooks of a user. Their requests to stop are kept, since all workers end after the same step.

    Attributes:
      have_asked: whether one of them has asked to stop.
    """

    def __init__(self, hooks: Sequence[v1.train.SessionRunHook]):
        self._hooks, self._coord = hooks, tf.train.Coordinator()
        self._context = self._outputs = None
        self.have_asked = False

    def __bool__(self):
        return bool(self._hooks)

    def begin(self) -> None:
        """Lets them add to the default graph, before it is finalized."""
        for hook in self._hooks:
            hook.begin()
        if self._hooks and not v1.get_collection(v1.GraphKeys.SAVERS):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())  # a CheckpointSaverHook needs one

    def session_created(self, session: v1.Session) -> None:
        for hook in self._hooks:
            hook.after_create_session(session, self._coord)
        self.have_asked = self._coord.should_stop()

    def run(self, session: v1.Session, train_op: tf.Operation, fetches):
        """Does a step with what they fetch and feed besides; returns the values of `fetches`."""
        self._context = v1.train.SessionRunContext(v1.train.SessionRunArgs(train_op), session)
        theirs, feeds, options, metadata = {}, {}, v1.RunOptions(), v1.RunMetadata()
        for i, hook in enumerate(self._hooks):
            asked = hook.before_run(self._context) or v1.train.SessionRunArgs(None)
            if asked.fetches is not None:
                theirs[i] = asked.fetches
            if twice := feeds.keys() & (asked.feed_dict or {}).keys():
                raise RuntimeError(f"two session hooks feed the same tensor: {', '.join(map(str, twice))}")
            feeds |= asked.feed_dict or {}
            _merge(options, asked.options)
        _, values, theirs = session.run((train_op, fetches, theirs), feeds, options, metadata)
        self._outputs = [v1.train.SessionRunValues(theirs.get(i), options, metadata) for i in range(len(self._hooks))]
        return values

    def after_step(self) -> None:
        for hook, values in zip(self._hooks, self._outputs, strict=True):
            hook.after_run(self._context, values)
        self.have_asked |= self._context.stop_requested or self._coord.should_stop()

    def end(self, session: v1.Session) -> None:
        for hook in self._hooks:
            hook.end(session)

    def close(self) -> None:
        """Ends their threads."""
        self._coord.request_stop()
        self._coord.join(ignore_live_threads=True)


def _merge(options: v1.RunOptions, others: v1.RunOptions | None) -> None:
    """Adds the options of one hook: the larger numbers, and all that is to be debugged."""
    if others:
        for field, value in others.ListFields():
            if field.message_type:
                getattr(options, field.name).MergeFrom(value)
            else:
                setattr(options, field.name, max(getattr(options, field.name), value))
