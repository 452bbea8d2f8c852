"""The task that TF_CONFIG gives to this process, as TensorFlow 1.15 read it."""

import dataclasses
import json
import os

from tower_train import errors

_CHIEFS = ("chief", "master")
_TRAINERS = (*_CHIEFS, "worker")
_VARIABLE = "TF_CONFIG"


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster; by default the only one.

    Attributes:
      cluster: {type of task: addresses}, empty for a single process.
      type: of this process's task.
      index: among the tasks of its type.
      model_dir: the directory for all; None if TF_CONFIG names none.
      service: further settings, which are passed on.
    """

    cluster: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    type: str = "worker"
    index: int = 0
    model_dir: str | None = None
    service: dict | None = None

    @property
    def is_chief(self) -> bool:
        """Whether it is the one that saves."""
        has_chief = any(name in self.cluster for name in _CHIEFS)
        return self.type in _CHIEFS or (self.type == "worker" and self.index == 0 and not has_chief)

    @property
    def num_workers(self) -> int:
        """The number of tasks that train."""
        return sum(len(self.cluster.get(name, ())) for name in _TRAINERS) if self.cluster else 1

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.cluster.get("ps", ()))

    @property
    def id_in_cluster(self) -> int | None:
        """Its number among all, the chief first; None for an evaluator, which stands outside."""
        if not self.cluster:
            return 0
        types = sorted(self.cluster, key=lambda name: (name not in _CHIEFS, name != "worker", name))
        tasks = [(name, i) for name in types for i in range(len(self.cluster[name]))]
        return tasks.index((self.type, self.index)) if (self.type, self.index) in tasks else None

    @property
    def address(self) -> str:
        """The session's target: empty for a single process."""
        addresses = self.cluster.get(self.type, ())
        return f"grpc://{addresses[self.index]}" if self.num_workers + self.num_ps > 1 and addresses else ""


def read() -> Task:
    """Reads TF_CONFIG.

    Raises:
      ConfigError: it is no JSON, or names a task that its cluster does not have.
    """
    text = os.environ.get(_VARIABLE) or "{}"
    try:
        found = json.loads(text)
        task = found.get("task") or {}
        cluster = {name: list(addresses) for name, addresses in (found.get("cluster") or {}).items()}
        kind, index = task.get("type", "worker"), int(task.get("index", 0))
        read = Task(cluster, kind, index, found.get("model_dir"), found.get("service"))
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f'{_VARIABLE}={text}: it must be JSON such as {{"cluster": {{"worker": ["host:2222"]}}, "task": {{"type": '
            f'"worker", "index": 0}}}} ({error}). Correct or unset it.'
        ) from None
    if cluster and kind != "evaluator" and not 0 <= index < len(cluster.get(kind, ())):
        there = ", ".join(f"{len(addresses)} {name}" for name, addresses in cluster.items())
        raise errors.ConfigError(
            f"{_VARIABLE}: this task is {kind} {index}, but its cluster has {there}. Correct or unset it."
        )
    return read


def check_is_alone(config) -> None:
    """Refuses to train in one of several processes, each of which would write to the same model_dir.

    Raises:
      ConfigError: the RunConfig tells of others.
    """
    workers, servers = config.num_worker_replicas, config.num_ps_replicas
    if workers <= 1 and not servers and config.task_type in _TRAINERS:
        return
    others = f" and {servers} parameter server{'s' * (servers > 1)}" if servers else ""
    raise errors.ConfigError(
        f"{_VARIABLE} describes {workers} worker{'s' * (workers != 1)}{others}, and makes this process a task of type "
        f"{config.task_type!r}. An Estimator trains in one process: unset {_VARIABLE} and start one, with "
        "RunConfig(num_gpus=N); for several machines write a workload (README)."
    )
