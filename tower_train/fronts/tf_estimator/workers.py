"""The workers of a TF_CONFIG, including this process: their start, their sessions, their end."""

import copy

import tensorflow as tf

from tower_train import console
from tower_train.cluster.task import of_jobs
from tower_train.fronts import compat, distributed, program
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import devices
from tower_train.graph.collectives import Keys

v1 = tf.compat.v1


def join(config: RunConfig, placed: devices.Devices) -> program.Cluster | None:
    """Makes this process a worker of the cluster in the config; None by itself.

    Raises:
      ConfigError: TF_CONFIG's cluster has tasks of other kinds.
      RunError, WorkerError: as of program.init.
    """
    jobs = config.cluster_spec.as_dict()
    if sum(map(len, jobs.values())) <= 1:
        return None
    program.leave_by_status()  # in one line, also of a task that is refused
    task = of_jobs(jobs, config.task_type, config.task_id)
    timeouts = config.worker_timeout_secs, config.session_creation_timeout_secs
    return program.init(None, None, *timeouts, stall_timeout_secs=0, task=task, placed=placed)


def open_session(
    training: Training, max_steps: int | None, *, config: v1.ConfigProto, hooks: list, **arguments
) -> v1.train.MonitoredSession:
    """Opens the session of a training of several workers, which begins with the chief's values and last step.

    Args:
      training: the call of Estimator.train.
      max_steps: its argument.
      config, hooks, arguments: of v1.train.MonitoredTrainingSession.
    """
    cluster, towers = training.cluster, training.num_towers // training.cluster.size
    Keys.of(v1.get_default_graph()).meaning["num_gpus"] = str(towers)
    begin = distributed.BroadcastGlobalVariablesHook(cluster=cluster)
    begin.broadcast = distributed.broadcast_variables(v1.global_variables(), cluster=cluster, series=training.name)
    if cluster.is_chief:
        console.notice(
            f"{cluster.size} workers train. A step takes {training.num_towers} batches, {towers} of each input_fn. Its "
            "argument input_context tells the worker's part of the data."
        )
    else:  # it writes nothing
        hooks = [hook for hook in hooks if not isinstance(hook, v1.train.CheckpointSaverHook)]
        arguments |= {"chief_only_hooks": (), "checkpoint_dir": None}
    config = merged(cluster.session_config, config)
    config.isolate_session_state = True  # variables of an earlier training stay on the server
    arguments |= {"hooks": [begin, *hooks, _Last(training, max_steps)], "master": cluster.target, "is_chief": True}
    return v1.train.MonitoredTrainingSession(config=config, **arguments)


def merged(ours: v1.ConfigProto, asked: v1.ConfigProto) -> v1.ConfigProto:
    """Returns a ConfigProto of our devices with the other settings that were asked for."""
    proto = copy.deepcopy(ours)
    proto.MergeFrom(asked)
    devices.use_gpus_alike(proto)
    proto.device_filters[:] = ours.device_filters  # a session sees this worker's devices only
    return proto


class _Last(v1.train.SessionRunHook):
    """Counts this worker's steps, and ends all workers after a hook before it asked for the end.

    The session goes on until the input ends in all of them, after the next step.
    """

    def __init__(self, training: Training, max_steps: int | None):
        self._counts, self._ask_to_stop = training.cluster.counts, training.batches.ask_to_stop
        self._max_steps, self._step = max_steps, v1.train.get_global_step()

    def after_create_session(self, session, coord):
        if self._max_steps and session.run(self._step) >= self._max_steps:
            console.notice(f"Nothing to train: max_steps={self._max_steps} are done.")
            coord.request_stop()

    def before_run(self, run_context):
        self._counts[0] += 1

    def after_run(self, run_context, run_values):
        self._counts[1] += 1
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
