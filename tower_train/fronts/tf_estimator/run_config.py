"""RunConfig: the library's, with towers, and with clusters that have workers only."""

import copy
from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.fronts.tf_estimator import library

_OF_TOWERS = ("num_gpus", "gpus", "worker_timeout_secs")


class RunConfig(library.run_config.RunConfig):
    """The settings of an Estimator's runs: the library's, and those of towers and workers.

    Args:
      args, kwargs: those of tf.estimator.RunConfig. The devices of a train_distribute strategy are those of the towers.
      num_gpus: towers that train; None for one.
      gpus: the ids of the GPUs that carry them, instead of num_gpus.
      worker_timeout_secs: seconds without a heartbeat after which another worker counts as missing.

    Raises:
      ConfigError: values that exclude each other.
      ValueError, TypeError: as of the library.
    """

    def __init__(
        self, *args, num_gpus: int | None = None, gpus: Sequence[int] | None = None,
        worker_timeout_secs: float = Config.worker_timeout_secs, **kwargs,
    ):  # fmt: skip
        self._num_gpus, self._gpus, self._worker_timeout_secs = num_gpus, gpus, worker_timeout_secs
        super().__init__(*args, **kwargs)
        self._validate_towers()

    num_gpus = property(lambda self: self._num_gpus, doc="The number of towers; None if not given.")
    gpus = property(lambda self: self._gpus, doc="The ids of the towers' GPUs; None if not given.")
    worker_timeout_secs = property(lambda self: self._worker_timeout_secs)

    @property
    def towers(self) -> int | Sequence[int]:
        """The number of towers that train, or the ids of their GPUs."""
        if self.gpus is not None:
            return self.gpus
        if self.train_distribute is None:
            return 1 if self.num_gpus is None else self.num_gpus
        devices = [tf.DeviceSpec.from_string(name) for name in self.train_distribute.extended.worker_devices]
        return [device.device_index for device in devices if device.device_type == "GPU"] or len(devices)

    def replace(self, **changes) -> "RunConfig":
        """Returns a copy with other values."""
        allowed = [*library.run_config._DEFAULT_REPLACEABLE_LIST, *_OF_TOWERS]
        replaced = self._replace(copy.deepcopy(self), allowed, **changes)
        replaced._validate_towers()
        return replaced

    def _validate_towers(self) -> None:
        values = [name for name in ("train_distribute", "num_gpus", "gpus") if getattr(self, name) is not None]
        if len(values) > 1:
            raise errors.ConfigError(f"RunConfig: {' and '.join(values)} both say what trains. Give one of them.")

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
