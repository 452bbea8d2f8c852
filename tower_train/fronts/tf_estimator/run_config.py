"""The settings of an Estimator: RunConfig and WarmStartSettings."""

import copy
import dataclasses
import inspect
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tower_train import config as train_config
from tower_train import errors
from tower_train.fronts.tf_estimator import task

_BY_DEFAULT = object()
_DEFAULT_SAVE_SECS = 600
_COUNTS = (
    "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs", "log_step_count_steps",
    "keep_checkpoint_max", "keep_checkpoint_every_n_hours",
)  # fmt: skip
_SAVED_MODELS = ("saved_model.pb", "saved_model.pbtxt")


class WarmStartSettings(NamedTuple):
    """The values that variables begin with; the arguments are those of tf.compat.v1.train.warm_start."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: object = ".*"
    var_name_to_vocab_info: dict | None = None
    var_name_to_prev_var_name: dict | None = None


def warm_start_settings(given) -> WarmStartSettings | None:
    """Returns warm_start_from, which may be the path of a checkpoint, a model_dir or an export, as settings."""
    if given is None:
        return None
    settings = given if isinstance(given, WarmStartSettings) else WarmStartSettings(given)
    path = settings.ckpt_to_initialize_from
    if not path or not isinstance(path, (str, bytes, os.PathLike)):
        raise errors.ConfigError(
            f"warm_start_from={given!r}: it must be the path of a checkpoint, of a model_dir or of an export, or "
            "WarmStartSettings."
        )
    path = os.fsdecode(path)
    if any(os.path.exists(os.path.join(path, name)) for name in _SAVED_MODELS):
        path = os.path.join(path, "variables", "variables")
    return settings._replace(ckpt_to_initialize_from=path)


def get_default_session_config() -> tf.compat.v1.ConfigProto:
    """Returns the session_config of an Estimator whose RunConfig has none."""
    return tf.compat.v1.ConfigProto(allow_soft_placement=True)


@dataclasses.dataclass(frozen=True)
class _Settings:
    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _BY_DEFAULT
    save_checkpoints_secs: int | None = _BY_DEFAULT
    session_config: tf.compat.v1.ConfigProto | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    device_fn: Callable | None = None
    protocol: str | None = None
    eval_distribute: Any = None
    experimental_distribute: Any = None
    experimental_max_worker_delay_secs: int | None = None
    session_creation_timeout_secs: int = 7200
    checkpoint_save_graph_def: bool = True
    num_gpus: int | None = None
    gpus: Sequence[int] | None = None
    worker_timeout_secs: float = train_config.Config.worker_timeout_secs
    stall_timeout_secs: float = 1800.0

    def __post_init__(self):
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is _BY_DEFAULT:
            self._set("save_checkpoints_steps", None)
        if secs is _BY_DEFAULT:
            self._set("save_checkpoints_secs", _DEFAULT_SAVE_SECS if steps is _BY_DEFAULT else None)
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise errors.ConfigError(
                f"save_checkpoints_steps={steps} and save_checkpoints_secs={secs} both say when to save. Give one of "
                "them."
            )
        if self.model_dir is not None:
            self._set("model_dir", os.fspath(self.model_dir))
            train_config.check_folder(self.model_dir, f"model_dir={self.model_dir}")
        self._check_kinds()
        distribute = self.train_distribute or getattr(self.experimental_distribute, "train_distribute", None)
        self._set("train_distribute", distribute)
        given = [name for name in ("train_distribute", "num_gpus", "gpus") if getattr(self, name) is not None]
        if len(given) > 1:
            raise errors.ConfigError(f"RunConfig: {' and '.join(given)} both say what trains. Give one of them.")

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)

    def _check_kinds(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            least = 1 if name == "log_step_count_steps" else 0
            if value is not None and (not isinstance(value, numbers.Real) or value < least):
                raise errors.ConfigError(f"RunConfig: {name}={value!r}; it must be a number from {least} on, or None.")
        if self.tf_random_seed is not None and not isinstance(self.tf_random_seed, numbers.Integral):
            raise errors.ConfigError(f"RunConfig: tf_random_seed={self.tf_random_seed!r}; it must be an int, or None.")
        if self.session_config is not None and not isinstance(self.session_config, tf.compat.v1.ConfigProto):
            raise errors.ConfigError(
                f"RunConfig: session_config={self.session_config!r}; it must be a tf.compat.v1.ConfigProto."
            )
        for name, allowed in (("worker_timeout_secs", "above 0"), ("stall_timeout_secs", "0 or more")):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or value < 0 or (value == 0 and allowed == "above 0"):
                raise errors.ConfigError(f"RunConfig: {name}={value!r}; it must be a number of seconds, {allowed}.")
        if self.device_fn is not None and not callable(self.device_fn):
            raise errors.ConfigError(f"RunConfig: device_fn={self.device_fn!r}; it must be a function of an op.")


def _with_read_only_settings(cls: type) -> type:
    """Gives a class a property for each field of _Settings, and its signature."""
    for field in dataclasses.fields(_Settings):
        setattr(cls, field.name, property(lambda self, name=field.name: getattr(self._settings, name)))
    cls.__signature__ = inspect.signature(_Settings)
    return cls


@_with_read_only_settings
class RunConfig:
    """The settings of an Estimator's runs, each a read-only property too. Names and defaults are those of TensorFlow
    1.15; those from num_gpus on are new.

    Args:
      model_dir: the directory of checkpoints and events.
      tf_random_seed: seed of the graph's random ops and of initial weights; None for another one each time.
      save_summary_steps: steps between summaries; None or 0 for none.
      save_checkpoints_steps: steps between checkpoints; the first and the last step are saved too.
      save_checkpoints_secs: seconds between checkpoints, instead of steps; 600 if neither is given. None for both: no
        checkpoints.
      session_config: a tf.compat.v1.ConfigProto, without its gpu_options: tf.config decides on a process's GPUs.
      keep_checkpoint_max: number of newest checkpoints kept; 0 or None for all.
      keep_checkpoint_every_n_hours: hours after each of which another one is kept.
      log_step_count_steps: steps between log lines of the loss and of steps/sec; None for none.
      train_distribute: a tf.distribute strategy, whose number of replicas counts as num_gpus.
      device_fn: (op) -> device, for each op of a model that one tower trains.
      protocol: accepted; workers talk by grpc.
      eval_distribute: accepted; an evaluation takes one device and gives the same metrics.
      experimental_distribute: a tf.distribute DistributeConfig, whose train_distribute is taken.
      experimental_max_worker_delay_secs: accepted; workers begin together.
      session_creation_timeout_secs: seconds to wait for workers that have not started.
      checkpoint_save_graph_def: whether checkpoints come with the graph.
      num_gpus: towers that train; None for one.
      gpus: the ids of the GPUs that carry them, instead of num_gpus.
      worker_timeout_secs: seconds without a heartbeat after which another worker counts as missing.
      stall_timeout_secs: with several workers, seconds without the end of a step after which to report what is waited
        for; worker_timeout_secs later all leave; 0 for never.

    Raises:
      ConfigError: values out of range, or that exclude each other.
    """

    def __init__(self, *args, **kwargs):
        self._settings, self._task = _Settings(*args, **kwargs), task.read()
        dirs = [path for path in (self._settings.model_dir, self._task.model_dir) if path]
        if len(set(dirs)) > 1:
            raise errors.ConfigError(f"model_dir={dirs[0]} and TF_CONFIG's {dirs[1]} differ. Give one of them.")
        if dirs:
            self._settings = dataclasses.replace(self._settings, model_dir=dirs[0])

    cluster_spec = property(lambda self: tf.train.ClusterSpec(self._task.cluster), doc="The cluster of TF_CONFIG.")
    task_type = property(lambda self: self._task.type, doc="The type of this process's task, such as 'worker'.")
    task_id = property(lambda self: self._task.index, doc="The number of this process among those of its type.")
    global_id_in_cluster = property(lambda self: self._task.id_in_cluster, doc="Its number among all.")
    is_chief = property(lambda self: self._task.is_chief, doc="Whether this process is the one that saves.")
    num_worker_replicas = property(lambda self: self._task.num_workers, doc="The number of processes that train.")
    num_ps_replicas = property(lambda self: self._task.num_ps, doc="The number of parameter servers.")
    master = property(lambda self: self._task.address, doc="The address of this process; empty for a single one.")
    evaluation_master = property(lambda self: self._task.evaluation_master, doc="TF_CONFIG's eval_session_master.")
    service = property(lambda self: self._task.service, doc="The service of TF_CONFIG.")

    @property
    def towers(self) -> int | Sequence[int]:
        """The number of towers that train, or the ids of their GPUs."""
        if self.gpus is not None:
            return self.gpus
        if self.train_distribute is not None:
            return self.train_distribute.num_replicas_in_sync
        return 1 if self.num_gpus is None else self.num_gpus

    def replace(self, **changes) -> "RunConfig":
        """Returns a copy with other values."""
        if "save_checkpoints_steps" in changes:
            changes.setdefault("save_checkpoints_secs", None)
        elif "save_checkpoints_secs" in changes:
            changes.setdefault("save_checkpoints_steps", None)
        replaced = copy.copy(self)
        vars(replaced).update(_settings=dataclasses.replace(self._settings, **changes))
        return replaced
