"""The workers of a TF_CONFIG, including this process: their start, their initial values, missing ones."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import tensorflow as tf

from tower_train import console
from tower_train.cluster import membership
from tower_train.cluster.membership import Membership
from tower_train.cluster.task import Policy, Task, of_jobs
from tower_train.fronts import compat, program
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.graph import devices, progress
from tower_train.graph.devices import Devices
from tower_train.run.watchdog import StepWatchdog

v1 = tf.compat.v1
_NEXT_STEP = (
    "The step under way is not saved. Start the same program on all machines again: it goes on from the chief's last "
    "checkpoint."
)


def join(config: RunConfig, placed: Devices) -> Membership:
    """Makes this process a member of the cluster in the config; a context manager.

    Args:
      config: of the Estimator.
      placed: the devices of this process's towers.

    Raises:
      ConfigError: TF_CONFIG's cluster has tasks of other kinds.
      RunError: its server cannot be started.
    """
    jobs = config.cluster_spec.as_dict()
    is_alone = sum(map(len, jobs.values())) <= 1
    task = Task(("localhost",), 0) if is_alone else of_jobs(jobs, config.task_type, config.task_id)
    if task.is_alone:
        return membership.join(task, placed, Policy(math.inf, math.inf))
    program.leave_by_status()
    policy = Policy(config.worker_timeout_secs, config.session_creation_timeout_secs, next_step=_NEXT_STEP)
    member = membership.join(task, placed, policy)
    member.devices.session_config.isolate_session_state = True  # variables of an earlier training stay on the server
    return member


@contextlib.contextmanager
def open_session(training, run_config: RunConfig, steps: tuple, **arguments) -> Iterator:
    """Yields the session of a training of several workers, once all are ready to train the same.

    Args:
      training: the call of Estimator.train.
      run_config: of the Estimator.
      steps: the chief's number of steps done, and the last one or None.
      arguments: of v1.train.MonitoredTrainingSession.

    Raises:
      ConfigError: another worker has another model.
      WorkerError: a worker is missing, or stands still.
    """
    member, batches = training.member, training.batches
    broadcast = training.all_reduce.broadcast(v1.global_variables(), member.devices.worker)
    first, last = _agree(member, steps)
    if last is not None and first >= last:
        console.notice(f"Nothing to train: step {first} is at or after the last one, {last}.")
        yield SimpleNamespace(should_stop=lambda: True)
        return

    def begin(session):
        member.session_opened(session)
        session.run(broadcast)  # gives all workers the chief's values; waits for the others

    with v1.variable_scope("tower_train"):  # of the input only: towers wait until all workers have theirs
        counting, counts = progress.count_progress({progress.INPUT: batches.arrivals})
    watchdog = StepWatchdog(run_config.stall_timeout_secs, counts, note_stall=member.note_stall)
    if not member.task.is_chief:
        arguments = _without_writing(begin, **arguments)
    hook = _Last(member, watchdog, begin if member.task.is_chief else None, counting, batches.ask_to_stop)
    arguments |= {"hooks": [*arguments["hooks"], hook], "master": member.target, "is_chief": True}
    config = merged(member.devices, arguments.pop("config"))
    with watchdog, member.failures_named(), v1.train.MonitoredTrainingSession(config=config, **arguments) as session:
        yield session


def _agree(member: Membership, steps: tuple) -> tuple:
    """Compares this worker's model with the others'; returns the chief's steps, (done, last)."""
    towers, num_workers = len(member.devices.towers), member.devices.num_workers
    about = {f"the variable {v.op.name}": f"{v.dtype.base_dtype.name}{v.shape}" for v in v1.global_variables()}
    agreed = member.agree(lambda: {"num_gpus": towers} | about, *steps)
    if member.task.is_chief:
        console.notice(
            f"{num_workers} workers train. A step takes {num_workers * towers} batches, {towers} of each input_fn. Its "
            "argument input_context tells the worker's part of the data."
        )
    return agreed


def _without_writing(begin: Callable, *, hooks: Sequence, scaffold: v1.train.Scaffold, **arguments) -> dict:
    """Returns the arguments of a session that writes nothing, and begins with the chief's values."""
    hooks = [hook for hook in hooks if not isinstance(hook, v1.train.CheckpointSaverHook)]
    scaffold = v1.train.Scaffold(init_fn=lambda _, session: begin(session), copy_from_scaffold=scaffold)
    return arguments | {"hooks": hooks, "scaffold": scaffold, "chief_only_hooks": (), "checkpoint_dir": None}


def merged(placed: Devices, asked: v1.ConfigProto) -> v1.ConfigProto:
    """Returns the ConfigProto of these devices with the other settings that were asked for."""
    proto = copy.deepcopy(placed.session_config)
    proto.MergeFrom(asked)
    devices.use_gpus_alike(proto)
    proto.device_filters[:] = placed.session_config.device_filters  # a session sees this worker's devices only
    return proto


class _Last(v1.train.SessionRunHook):
    """Begins this worker's session, watches and counts its steps, and ends all workers after a hook before it asked
    for the end.

    The session goes on until the input ends in all of them, after the next step.
    """

    def __init__(
        self, member: Membership, watchdog: StepWatchdog, begin: Callable[[v1.Session], None] | None,
        counting: Sequence[tf.Operation], ask_to_stop: tf.Operation,
    ):  # fmt: skip
        self._member, self._watchdog, self._begin, self._is_open = member, watchdog, begin, False
        self._counting, self._ask_to_stop = v1.train.SessionRunArgs(counting), ask_to_stop

    def after_create_session(self, session, coord):
        if self._is_open:  # MonitoredSession reopens itself after an error; the other workers do not
            raise self._member.failure_behind(tf.errors.UnavailableError(None, None, "a step has failed"))
        self._is_open = True
        self._watchdog.session = session
        if self._begin:
            self._begin(session)

    def before_run(self, run_context):
        self._watchdog.begin_step()
        return self._counting

    def after_run(self, run_context, run_values):
        self._watchdog.end_step()
        self._member.note_step()
        if run_context.stop_requested:
            run_context._stop_requested = False
            run_context.session.run(self._ask_to_stop)


_librarys = library.training.train_and_evaluate


class _Executor(library.training._TrainingExecutor):
    """Trains and evaluates as this process's task, without the library's servers and delays."""

    def run(self) -> tuple:
        config = self.estimator.config
        is_alone = config.task_type == "worker" and config.num_worker_replicas == 1
        return (self.run_local() if is_alone else super().run()) or (None, [])

    def run_worker(self):
        return self.run_chief()  # the first of workers may be the chief

    def _start_std_server(self, config) -> None:
        """Leaves the server to `join`."""


def train_and_evaluate(estimator, train_spec, eval_spec) -> tuple:
    """Trains, evaluates checkpoints during training and the last one, and exports: the library's train_and_evaluate.

    A process by itself does all of that, as does a TF_CONFIG's master with its workers. A chief and its workers only
    train; the task of type evaluator evaluates each new checkpoint, until it has evaluated one of max_steps.

    Returns:
      The last evaluation's result and the list of its exporters' results; (None, []) for a task of a cluster.

    Raises:
      ValueError, TypeError: as of the library.
      UserError: as Estimator.train.
    """
    with (
        compat.replaced(library.training, "_TrainingExecutor", _Executor),
        compat.replaced(library.training, "_MAX_DELAY_SECS", 0),
    ):
        return _librarys(estimator, train_spec, eval_spec)
