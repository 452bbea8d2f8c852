"""The workers of a TF_CONFIG, including this process: their start, their initial values, missing ones."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster import membership
from tower_train.cluster.membership import Membership
from tower_train.cluster.program import IN_ONE_LINE
from tower_train.cluster.task import Task, of_jobs
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.inputs import Batches
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.graph import progress
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import Devices

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
      ConfigError: TF_CONFIG's cluster has tasks of other kinds, or a strategy has taken this worker's place.
      RunError: its server cannot be started.
    """
    jobs = config.cluster_spec.as_dict()
    is_alone = sum(map(len, jobs.values())) <= 1
    task = Task(("localhost",), 0) if is_alone else of_jobs(jobs, config.task_type, config.task_id)
    if task.is_alone:
        return membership.join(task, placed, math.inf, math.inf)
    resolver = getattr(config.train_distribute, "cluster_resolver", None)
    if resolver and resolver.cluster_spec():
        raise errors.ConfigError(
            f"RunConfig: train_distribute={type(config.train_distribute).__name__} has a server of its own at this "
            "worker's address. Leave it out: the workers of TF_CONFIG train together without a strategy."
        )
    _leave_by_status()
    timeouts = config.worker_timeout_secs, config.session_creation_timeout_secs
    member = membership.join(task, placed, *timeouts, next_step=_NEXT_STEP)
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


class Sessions:
    """Opens the session of a training of several workers, in place of v1.train.MonitoredTrainingSession.

    Args:
      member: from `join`.
      config: of the Estimator.
      batches: this worker's.
      all_reduce: between the workers.
      steps: the chief's number of steps done, and the last one or None.
    """

    def __init__(
        self, member: Membership, config: RunConfig, batches: Batches, all_reduce: AllReduce, steps: tuple
    ):  # fmt: skip
        self._member, self._config, self._batches, self._steps = member, config, batches, steps
        self._all_reduce = all_reduce
        with v1.variable_scope("tower_train"):  # of the input only: towers wait until all workers have theirs
            self.counting, counts = progress.count_progress(batches.arrivals, [], [])
        self._watchdog = StepWatchdog(config.stall_timeout_secs, counts, note_stall=member.note_stall)

    @contextlib.contextmanager
    def open(self, *, scaffold, hooks, chief_only_hooks, checkpoint_dir, config, **kwargs) -> Iterator:
        """Yields the session, once all workers are ready to train the same.

        Args:
          config: of the session.
          scaffold, hooks, chief_only_hooks, checkpoint_dir, kwargs: as of v1.train.MonitoredTrainingSession.

        Raises:
          ConfigError: another worker has another model.
          WorkerError: a worker is missing, or stands still.
        """
        member, is_chief = self._member, self._member.task.is_chief
        broadcast = self._all_reduce.broadcast(v1.global_variables(), member.devices.worker)
        first, last = self._agree()
        if last is not None and first >= last:
            console.notice(f"Nothing to train: step {first} is at or after the last one, {last}.")
            yield SimpleNamespace(should_stop=lambda: True)
            return

        def begin(session):
            member.session_opened(session)
            session.run(broadcast)  # gives all workers the chief's values; waits for the others

        if is_chief:
            hooks = [*chief_only_hooks, *_reporters(scaffold, checkpoint_dir, **kwargs), *hooks]
        else:
            hooks = [hook for hook in hooks if not isinstance(hook, v1.train.CheckpointSaverHook)]
            scaffold = v1.train.Scaffold(init_fn=lambda _, session: begin(session), copy_from_scaffold=scaffold)
        hooks = [*hooks, self._watchdog, _Last(member, begin if is_chief else None, self._batches.ask_to_stop)]
        with self._watchdog, member.failures_named():
            # Not one that reopens itself after an error: the other workers would not.
            with v1.train.SingularMonitoredSession(
                hooks, scaffold, member.target, config, checkpoint_dir if is_chief else None
            ) as session:
                yield session

    def _agree(self) -> tuple[int, int | None]:
        """Waits until all workers are ready; returns the chief's number of steps done, and the last one."""
        towers, num_workers = len(self._member.devices.towers), self._member.devices.num_workers
        about = {f"the variable {v.op.name}": f"{v.dtype.base_dtype.name}{v.shape}" for v in v1.global_variables()}
        agreed = self._member.agree(lambda: {"num_gpus": towers} | about, *self._steps)
        if self._member.task.is_chief:
            console.notice(
                f"{num_workers} workers train. A step takes {num_workers * towers} batches, {towers} of each input_fn. "
                "Its argument input_context tells the worker's part of the data."
            )
        return agreed


def _reporters(scaffold, model_dir: str, *, save_summaries_steps, log_step_count_steps, **_) -> list:
    """Returns the hooks that write steps/sec and summaries, as of v1.train.MonitoredTrainingSession."""
    found = []
    if log_step_count_steps:
        found.append(v1.train.StepCounterHook(log_step_count_steps, output_dir=model_dir))
    if save_summaries_steps:
        found.append(v1.train.SummarySaverHook(save_summaries_steps, output_dir=model_dir, scaffold=scaffold))
    return found


class _Last(v1.train.SessionRunHook):
    """Begins this worker's session, counts its steps, and ends all workers after a hook before it asked for the end.

    The session goes on until the input ends in all of them, after the next step.
    """

    def __init__(self, member: Membership, begin: Callable[[v1.Session], None] | None, ask_to_stop: tf.Operation):
        self._member, self._begin, self._ask_to_stop = member, begin, ask_to_stop

    def after_create_session(self, session, coord):
        if self._begin:
            self._begin(session)

    def after_run(self, run_context, run_values):
        self._member.note_step()
        if run_context.stop_requested:
            library.withdraw_stop(run_context)
            run_context.session.run(self._ask_to_stop)


_librarys = library.training.train_and_evaluate


class _Executor(library.training._TrainingExecutor):
    """Trains and evaluates as this process's task, without the library's servers and delays."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._evaluated = None

    def run(self) -> tuple:
        config = self.estimator.config
        if config.task_type == "evaluator":
            self.run_evaluator()
            return self._evaluated, []
        if config.task_type == "worker" and config.num_worker_replicas == 1:
            return self.run_local()
        (self.run_chief if config.is_chief and config.task_type == "worker" else super().run)()
        return None, []

    def _start_std_server(self, config) -> None:
        """Leaves the server to `join`."""

    def _execute_evaluator_once(self, *args):
        result, stops = super()._execute_evaluator_once(*args)
        self._evaluated = result.metrics or self._evaluated
        return result, stops


def train_and_evaluate(estimator, train_spec, eval_spec) -> tuple:
    """Trains, evaluates checkpoints during training and the last one, and exports: the library's train_and_evaluate.

    A process by itself does all of that, as does a TF_CONFIG's master with its workers. A chief and its workers only
    train; the task of type evaluator evaluates each new checkpoint, until it has evaluated one of max_steps.

    Returns:
      The last evaluation's result and the list of its exporters' results; (None, []) if this process did not evaluate.

    Raises:
      ValueError, TypeError: as of the library.
      UserError: as Estimator.train.
    """
    with (
        compat.replaced(library.training, "_TrainingExecutor", _Executor),
        compat.replaced(library.training, "_MAX_DELAY_SECS", 0),
    ):
        return _librarys(estimator, train_spec, eval_spec)
