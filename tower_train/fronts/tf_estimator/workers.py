"""The workers of a TF_CONFIG, including this process: their start, their initial values, missing ones."""

import contextlib
import functools
import math
import sys
from collections.abc import Iterator

import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster import membership
from tower_train.cluster.membership import Membership
from tower_train.cluster.program import IN_ONE_LINE
from tower_train.cluster.task import Task
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.fronts.tf_estimator import task
from tower_train.fronts.tf_estimator.model import Built
from tower_train.fronts.tf_estimator.model_towers import TrainStep
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.graph import progress
from tower_train.graph.devices import Devices
from tower_train.options import rules
from tower_train.run.hooks import UserHook

v1 = tf.compat.v1
_NEXT_STEP = (
    "The step under way is not saved. Start the same program on all machines again: it goes on from the chief's last "
    "checkpoint."
)


def task_of(config: RunConfig) -> Task:
    """Returns this process's place among those that train, the chief first; ConfigError if it does not train, or the
    cluster has parameter servers."""
    if config.num_ps_replicas or config.task_type == "ps":
        raise errors.ConfigError(
            f"TF_CONFIG describes {config.num_ps_replicas} parameter servers, which there are none of here: each "
            "worker has all variables, and gradients are averaged. Take 'ps' out of the cluster, and start none."
        )
    if config.task_type not in task.TRAINERS:
        raise errors.ConfigError(
            f"TF_CONFIG makes this process a task of type {config.task_type!r}, which does not train. Call "
            "train_and_evaluate, in which an evaluator evaluates; chief, master and worker train."
        )
    cluster = config.cluster_spec.as_dict()
    hosts = tuple(host for kind in task.TRAINERS for host in cluster.get(kind, ()))
    if len(hosts) <= 1:
        return Task(("localhost",), 0)
    rules.check_hosts(hosts, f"TF_CONFIG={cluster}")
    before = task.TRAINERS[: task.TRAINERS.index(config.task_type)]
    return Task(hosts, sum(len(cluster.get(kind, ())) for kind in before) + config.task_id)


def join(config: RunConfig, placed: Devices) -> Membership:
    """Makes this process a member of the cluster in the config; a context manager, and a hook.

    Args:
      config: of the Estimator.
      placed: the devices of this process's towers.

    Raises:
      ConfigError: as for task_of, or a strategy of TensorFlow's has taken this worker's place.
      RunError: its server cannot be started.
    """
    if (found := task_of(config)).is_alone:
        return membership.join(found, placed, math.inf, math.inf)
    resolver = getattr(config.train_distribute, "cluster_resolver", None)
    if resolver and resolver.cluster_spec():
        raise errors.ConfigError(
            f"RunConfig: train_distribute={type(config.train_distribute).__name__} has a server of its own at this "
            "worker's address. Leave it out: the workers of TF_CONFIG train together without a strategy."
        )
    _leave_by_status()
    timeouts = config.worker_timeout_secs, config.session_creation_timeout_secs
    member = membership.join(found, placed, *timeouts, next_step=_NEXT_STEP)
    member.devices.session_config.isolate_session_state = True  # variables of an earlier training stay on the server
    return member


@functools.cache
def _leave_by_status() -> None:
    """Makes a program that does not catch a UserError end with its status, by which it may be restarted."""
    before = sys.excepthook

    def leave(kind, error, traceback):
        if isinstance(error, IN_ONE_LINE):
            console.notice(f"error: {error}")
        else:
            before(kind, error, traceback)
        if isinstance(error, errors.UserError):
            sys.exit(error.exit_status)

    sys.excepthook = leave


class Together:
    """The relations of one worker's training to the others'.

    Attributes:
      is_chief: whether this worker is the one that saves.
      target: the server to open sessions on.
      counting: ops to run with each step.
    """

    def __init__(self, member: Membership, config: RunConfig, built: Built, step: TrainStep):
        """Adds to the default graph.

        Args:
          member: from `join`.
          config: of the Estimator.
          built: the towers.
          step: of all towers.
        """
        self._member, self._ask_to_stop = member, built.inputs.ask_to_stop
        self.is_chief, self.target, worker = member.task.is_chief, member.target, member.devices.worker
        self._broadcast = built.all_reduce.broadcast(v1.global_variables(), worker)
        with v1.variable_scope("tower_train"):  # of the input only: towers wait until all workers have theirs
            self.counting, counts = progress.count_progress(built.inputs.arrivals, [], [])
        self._watchdog = StepWatchdog(config.stall_timeout_secs, counts, note_stall=member.note_stall)

    def agree(self, steps_done: int, last_step: float | None) -> tuple[int, float | None]:
        """Waits until all workers are ready to train the same, and returns the chief's steps_done and last_step.

        Raises:
          ConfigError: another worker has another model.
          WorkerError: a worker is missing.
        """
        towers = len(self._member.devices.towers)
        about = {f"the variable {v.op.name}": f"{v.dtype.base_dtype.name}{v.shape}" for v in v1.global_variables()}
        agreed = self._member.agree(lambda: {"num_gpus": towers} | about, steps_done, last_step)
        if self.is_chief:
            workers = self._member.devices.num_workers
            console.notice(
                f"{workers} workers train. A step takes {workers * towers} batches, {towers} of each input_fn. "
                "Its argument input_context tells the worker's part of the data."
            )
        return agreed

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Names a missing worker, or a step that stands still, in a WorkerError around the session."""
        with self._watchdog, self._member.failures_named():
            yield

    def scaffold(self, given: v1.train.Scaffold) -> v1.train.Scaffold:
        """Returns the scaffold of this worker's session, in which variables begin with the chief's values."""
        if self.is_chief:
            return given

        def receive(_, session):
            self._begin(session)

        return v1.train.Scaffold(init_op=tf.no_op(), init_fn=receive, copy_from_scaffold=given)

    def hooks(self, hooks: list[v1.train.SessionRunHook]) -> list[v1.train.SessionRunHook]:
        """Returns hooks by which the given ones end all workers together: the next step ends as an input does."""
        begin = [_Begin(self._begin)] if self.is_chief else []
        wrapped = [UserHook(hook) for hook in hooks]
        return [_CountSteps(self._member), *begin, self._watchdog, *wrapped, _AskToStop(wrapped, self._ask_to_stop)]

    def _begin(self, session: v1.Session) -> None:
        """Gives all workers the chief's values; waits for the others."""
        self._member.session_opened(session)
        session.run(self._broadcast)


class _CountSteps(v1.train.SessionRunHook):
    """Counts steps for the other workers."""

    def __init__(self, member: Membership):
        self._member = member

    def after_run(self, run_context, run_values):
        self._member.note_step()


class _Begin(v1.train.SessionRunHook):
    """Calls a function with a session that has its values."""

    def __init__(self, begin):
        self._begin = begin

    def after_create_session(self, session, coord):
        self._begin(session)


class _AskToStop(v1.train.SessionRunHook):
    """Runs an op once one of the hooks has asked for the end."""

    def __init__(self, hooks: list[UserHook], ask_to_stop: tf.Operation):
        self._hooks, self._ask_to_stop = hooks, ask_to_stop

    def after_run(self, run_context, run_values):
        if any(hook.has_asked for hook in self._hooks):
            run_context.session.run(self._ask_to_stop)
