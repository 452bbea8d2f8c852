"""Actions after a step: the base class of the run's actions, and users' hooks."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.graph.record import StepReport

v1 = tf.compat.v1


class Action:
    """Base of what may be due after a step; by default after each."""

    def begin(self) -> None:
        """Called before the first step."""

    def is_due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, report: StepReport) -> None:
        """Acts on a step, from its report in numpy values."""

    def end(self, step: int) -> None:
        """Called after the last step of this start, unless an error ends it."""


class UserHooks(Action):
    """A user's SessionRunHooks around each step, called as MonitoredSession does, and functions after each step, log
    line and evaluation."""

    def __init__(
        self,
        hooks: Sequence[v1.train.SessionRunHook] = (),
        after_step: Callable[[int, StepReport], bool | None] | None = None,
        on_log: Callable[[dict], None] | None = None,
        on_evaluate: Callable[[dict], None] | None = None,
    ):
        # called with metrics.jsonl's records
        self.on_log, self.on_evaluate = on_log or (lambda record: None), on_evaluate or (lambda record: None)
        self._hooks, self._function, self._coord = hooks, after_step, tf.train.Coordinator()
        self._session = self._context = self._outputs = None
        self.have_asked = False  # to stop; kept, since all workers end after the same step

    def __bool__(self):
        return bool(self._hooks)

    def extend_graph(self) -> None:
        """Lets them add to the default graph, before it is finalized."""
        for hook in self._hooks:
            hook.begin()

    def session_created(self, session: v1.Session) -> None:
        self._session = session
        with session.graph.as_default():  # hooks expect their graph to be the default one
            for hook in self._hooks:
                hook.after_create_session(session, self._coord)
        self.have_asked = self._coord.should_stop()

    def run(self, fetches):
        """Does a step with what they fetch and feed besides; returns the values of `fetches`."""
        self._context = v1.train.SessionRunContext(v1.train.SessionRunArgs(fetches), self._session)
        theirs, feeds, options, metadata = {}, {}, v1.RunOptions(), v1.RunMetadata()
        for i, hook in enumerate(self._hooks):
            with self._session.graph.as_default():
                asked = hook.before_run(self._context) or v1.train.SessionRunArgs(None)
            if asked.fetches is not None:
                theirs[i] = asked.fetches
            # MonitoredSession refuses that too
            if twice := feeds.keys() & (asked.feed_dict or {}).keys():
                raise RuntimeError(f"two session hooks feed the same tensor: {', '.join(map(str, twice))}")
            feeds |= asked.feed_dict or {}
            options.MergeFrom(asked.options or v1.RunOptions())
        values, theirs = self._session.run((fetches, theirs), feeds, options, metadata)
        self._outputs = [v1.train.SessionRunValues(theirs.get(i), options, metadata) for i in range(len(self._hooks))]
        return values

    def is_due(self, step):  # without hooks a step is to take no longer
        return bool(self._hooks or self._function)

    def __call__(self, step, report):
        if self._hooks:
            with self._session.graph.as_default():
                for hook, values in zip(self._hooks, self._outputs, strict=True):
                    hook.after_run(self._context, values)
            self.have_asked |= self._context.stop_requested or self._coord.should_stop()
        if self._function:
            self.have_asked |= bool(self._function(step, report))

    def end(self, step):  # while the session is open, as hooks save at the end
        with self._session.graph.as_default():
            for hook in self._hooks:
                hook.end(self._session)

    def close(self) -> None:
        """Ends the threads of hooks such as queue runners."""
        self._coord.request_stop()
        self._coord.join(ignore_live_threads=True)
