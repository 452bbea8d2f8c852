"""The task of this process in TF_CONFIG, as TensorFlow 1.15 read it."""

import dataclasses
import json
import os

from tower_train import errors

CHIEFS, EVALUATOR = ("chief", "master"), "evaluator"
TRAINERS = (*CHIEFS, "worker")  # in the order in which workers are counted
_VARIABLE = "TF_CONFIG"


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster; by default the only one.

    Attributes:
      cluster: {type of task: addresses}, empty for a single process and for an evaluator, which is outside of it.
      type: of this process's task.
      index: among the tasks of its type.
      model_dir: the directory for all; None if TF_CONFIG has none.
      service: further settings, which are passed on.
      master, evaluation_master: the session's target in TF_CONFIG, for training and evaluation; None if it has none.
    """

    cluster: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    type: str = "worker"
    index: int = 0
    model_dir: str | None = None
    service: dict | None = None
    master: str | None = None
    evaluation_master: str = ""

    @property
    def is_chief(self) -> bool:
        """True for the task that saves."""
        has_chief = any(name in self.cluster for name in CHIEFS)
        return self.type in CHIEFS or (self.type == "worker" and self.index == 0 and not has_chief)

    @property
    def num_workers(self) -> int:
        """The number of tasks that train."""
        if not self.cluster:
            return 0 if self.type == EVALUATOR else 1
        return sum(len(self.cluster.get(name, ())) for name in TRAINERS)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.cluster.get("ps", ()))

    @property
    def id_in_cluster(self) -> int | None:
        """Its number among all, the chief first and parameter servers last; None for an evaluator."""
        if self.type == EVALUATOR:
            return None
        types = sorted(self.cluster, key=lambda name: (name not in CHIEFS, name == "ps", name))
        return sum(len(self.cluster[name]) for name in types[: types.index(self.type)]) + self.index if types else 0

    @property
    def address(self) -> str:
        """The session's target: empty for a single process."""
        if self.master is not None:
            return self.master
        addresses = self.cluster.get(self.type, ())
        return f"grpc://{addresses[self.index]}" if sum(map(len, self.cluster.values())) > 1 else ""


def read() -> Task:
    """Reads TF_CONFIG; ConfigError if it is no JSON, or names a task that its cluster does not have."""
    text = os.environ.get(_VARIABLE) or "{}"
    try:
        found = json.loads(text)
        given = found.get("task") or {}
        cluster = {name: list(addresses) for name, addresses in (found.get("cluster") or {}).items()}
        kind, index = given.get("type", "worker"), int(given.get("index", 0))
        masters = found.get("session_master"), found.get("eval_session_master", "")
        task = Task(cluster, kind, index, found.get("model_dir"), found.get("service"), *masters)
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f'{_VARIABLE}={text}: it must be JSON such as {{"cluster": {{"worker": ["host:2222"]}}, "task": {{"type": '
            f'"worker", "index": 0}}}} ({error}). Correct or unset it.'
        ) from None
    if fault := _fault(task, given):
        raise errors.ConfigError(f"{_VARIABLE}: {fault}. Correct or unset it.")
    return dataclasses.replace(task, cluster={}) if kind == EVALUATOR else task


def _fault(task: Task, given: dict) -> str | None:
    """Returns why this task cannot be one of its cluster; None if it can."""
    cluster, place = task.cluster, f"{task.type} {task.index}"
    if task.index < 0:
        return f"this task is {place}; tasks are counted from 0"
    if not cluster:
        return None
    if not {"type", "index"} <= given.keys():
        return f"it has a cluster, but its task is {given}, which must have a type and an index"
    if (chiefs := sum(len(cluster.get(name, ())) for name in CHIEFS)) > 1:
        return f"its cluster has {chiefs} tasks of the types chief and master; there must be one"
    if task.type != EVALUATOR and not task.index < len(cluster.get(task.type, ())):
        there = ", ".join(f"{len(addresses)} {name}" for name, addresses in cluster.items())
        return f"this task is {place}, but its cluster has {there}"
    return None
