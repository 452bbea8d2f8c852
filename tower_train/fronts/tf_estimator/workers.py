"""RunConfig with its TF_CONFIG, and the workers there, including this process: their start, sessions and end."""

import copy
import operator
from collections.abc import Sequence

import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster import program
from tower_train.cluster.task import from_jobs
from tower_train.config import Config
from tower_train.fronts import compat, distributed, placement
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import devices
from tower_train.graph.collectives import Keys

v1 = tf.compat.v1


_OURS = ("num_gpus", "gpus", "worker_timeout_secs", "batch_norm", "check_towers", "jit_compile")  # of RunConfig


class RunConfig(library.run_config.RunConfig):
    """The settings of an Estimator's runs: the library's, and those of towers and workers.

    Args:
      args, kwargs: those of tf.estimator.RunConfig. The devices of a train_distribute strategy are those of the towers.
      num_gpus: towers that train; None for one.
      gpus: the ids of the GPUs that carry them, instead of num_gpus.
      worker_timeout_secs: seconds without a heartbeat after which another worker counts as missing.
      batch_norm: global: batches are normalised over all towers, as on one device; tower: each tower's by itself.
      check_towers: auto: the first training compares the towers of all workers with one device, as
        tower_train.estimator.check does, before it begins; it prints a line, and raises if they differ; never: it does
        not.
      jit_compile: always: XLA compiles model_fn in each tower; never; auto: on GPUs. session_config's global_jit_level
        has TensorFlow compile what it chooses.
    """

    def __init__(
        self,
        *args,
        num_gpus: int | None = None,
        gpus: Sequence[int] | None = None,
        worker_timeout_secs: float = Config.worker_timeout_secs,
        batch_norm: str = "global",
        check_towers: str = "auto",
        jit_compile: str = "auto",
        **kwargs,
    ):
        placement.check_choices("RunConfig", batch_norm=batch_norm, check_towers=check_towers, jit_compile=jit_compile)
        self._batch_norm, self._check_towers, self._jit_compile = batch_norm, check_towers, jit_compile
        self._num_gpus, self._gpus, self._worker_timeout_secs = num_gpus, gpus, worker_timeout_secs
        super().__init__(*args, **kwargs)

    @property
    def towers(self) -> int | Sequence[int]:
        """The number of towers that train, or the ids of their GPUs; ConfigError if two arguments say that."""
        asked = {name: getattr(self, name) for name in ("train_distribute", "num_gpus", "gpus")}
        asked = {name: value for name, value in asked.items() if value is not None}
        if len(asked) > 1:
            raise errors.ConfigError(f"RunConfig: {' and '.join(asked)} both say what trains. Give one of them.")
        if self.train_distribute is None:
            return next(iter(asked.values()), 1)
        names = self.train_distribute.extended.worker_devices
        strategys = [tf.DeviceSpec.from_string(name) for name in names]
        return [device.device_index for device in strategys if device.device_type == "GPU"] or len(names)

    @property
    def num_towers(self) -> int:
        """The number of towers that train in this worker."""
        return self.towers if isinstance(self.towers, int) else len(self.towers)

    def is_compiled(self, placed: devices.Devices) -> bool:
        """Returns whether XLA compiles model_fn for towers on these devices."""
        return self.jit_compile == "always" or (self.jit_compile == "auto" and bool(placed.gpus))

    def replace(self, **changes) -> "RunConfig":
        allowed = [*library.run_config._DEFAULT_REPLACEABLE_LIST, *_OURS]
        return self._replace(copy.deepcopy(self), allowed, **changes)

    def alone(self, **changes) -> "RunConfig":
        """Returns a copy with these changes for a training by this process without the other workers."""
        changed = self.replace(**changes)
        changed._init_distributed_setting_from_environment_var({})
        return changed

    def _init_distributed_setting_from_environment_var(self, tf_config: dict) -> None:
        """Reads TF_CONFIG. Jobs without tasks are left out; the first of workers without a chief is the chief."""
        cluster = {job: hosts for job, hosts in (tf_config.get("cluster") or {}).items() if hosts}
        task = tf_config.get("task") or {}
        if "worker" not in cluster or cluster.keys() & {"chief", "master"} or not {"type", "index"} <= task.keys():
            return super()._init_distributed_setting_from_environment_var(tf_config | {"cluster": cluster})
        chief, *workers = cluster["worker"]
        renamed = cluster | {"chief": [chief], "worker": workers}
        renamed = {job: hosts for job, hosts in renamed.items() if hosts}
        kind, index = task["type"], int(task["index"])
        if kind == "worker" and index >= 0:
            task = {"type": "worker", "index": index - 1} if index else {"type": "chief", "index": 0}
        super()._init_distributed_setting_from_environment_var(tf_config | {"cluster": renamed, "task": task})
        if kind != "evaluator":
            self._cluster_spec, self._task_type, self._task_id = tf.train.ClusterSpec(cluster), kind, index


for _name in _OURS:
    setattr(RunConfig, _name, property(operator.attrgetter(f"_{_name}")))


class TPURunConfig(RunConfig, library.api.tpu.RunConfig):
    """tf.estimator.tpu.RunConfig, whose first argument is a TPUConfig; this is of effect only on TPUs."""


def join(config: RunConfig, placed: devices.Devices) -> program.Cluster | None:
    """Makes this process a worker of the cluster in the config; None by itself.

    Raises the errors of from_jobs and program.init.
    """
    jobs = config.cluster_spec.as_dict()
    if sum(map(len, jobs.values())) <= 1:
        return None
    program.leave_by_status()  # in one line, also of a task that is refused
    task = from_jobs(jobs, config.task_type, config.task_id)
    timeouts = config.worker_timeout_secs, config.session_creation_timeout_secs
    return program.init(None, None, *timeouts, stall_timeout_secs=0, task=task, placed=placed)


def open_session(
    training: Training, max_steps: int | None, *, config: v1.ConfigProto, hooks: list, **arguments
) -> v1.train.MonitoredSession:
    """Opens the session of a training of several workers, which begins with the chief's values and last step.

    config, hooks and arguments are those of v1.train.MonitoredTrainingSession.
    """
    cluster, towers = training.cluster, training.num_towers // training.cluster.size
    Keys.of(v1.get_default_graph()).meaning["num_gpus"] = str(towers)
    begin = distributed.BroadcastGlobalVariablesHook()
    begin.broadcast = distributed.broadcast_variables(v1.global_variables(), series=training.name)
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


_train_and_evaluate = library.training.train_and_evaluate  # programs may put ours in its place


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
    train; the task of type evaluator evaluates each new checkpoint, until it has evaluated one of max_steps. A task of
    a cluster returns (None, []). Errors are those of the library and of Estimator.train.
    """
    with (
        compat.replaced(library.training, "_TrainingExecutor", _Executor),
        compat.replaced(library.training, "_MAX_DELAY_SECS", 0),
    ):
        return _train_and_evaluate(estimator, train_spec, eval_spec)
