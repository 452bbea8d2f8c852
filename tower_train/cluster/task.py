"""This process's task among several that train together, and the policy for those that are missing."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence

from tower_train import errors
from tower_train.options import rules

_SLURM_PORT = 8888  # of a node's first task, as in TensorFlow's SlurmClusterResolver
_RANGE = r"([0-9]{1,5})(?:-([0-9]{1,5}))?"  # 1 or 1-2
_JOBS = ("chief", "master", "worker")  # of TF_CONFIG, in the order in which their tasks are counted
_RESTART = (
    "The same command on every machine, or the return of the missing one with --wait_for_workers, goes on from the "
    "last checkpoint."
)
_AGAIN = "a program that calls train() must be started again. Both then go on from the last checkpoint."
_WAITING = f"--wait_for_workers: python -m tower_train starts itself again; {_AGAIN}"
RESIZES = f"--elastic: python -m tower_train starts itself again, with those that are there; {_AGAIN}"


@dataclasses.dataclass(frozen=True)
class Task:
    """One worker of a cluster."""

    hosts: tuple[str, ...]  # over workers, host:port; the first is the chief
    index: int  # of this process among them

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return len(self.hosts) == 1

    @property
    def local(self) -> tuple[int, int]:
        """(rank, size) among the workers of this machine, those with one host name."""
        names = [host.rpartition(":")[0] for host in self.hosts]
        here = names[self.index]
        return names[: self.index].count(here), names.count(here)

    def name(self, index: int) -> str:
        """Returns a worker's name for people."""
        return f"worker {index} ({'the chief, ' if index == 0 else ''}{self.hosts[index]})"


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy of workers for those that are missing."""

    worker_timeout_secs: float  # without a heartbeat, after which a worker that had started is missing
    start_timeout_secs: float  # after which a worker that has not started is missing
    waits: bool = False  # before the first step, without a limit
    sizes: tuple[int, int] | None = None  # least and most workers of an elastic cluster
    next_step: str | None = None  # advice after a failure; None: as for a run

    @property
    def advice(self) -> str:
        """The next step after a failure, for messages."""
        usual = RESIZES if self.sizes else _WAITING if self.waits else _RESTART
        return self.next_step or f"The step under way is not saved. {usual}"


def find_task(worker_hosts: str | None, task_index: int | None) -> Task:
    """Finds this process's task: by --worker_hosts (host:port of all workers, joined by commas) and --task_index, else
    by TF_CONFIG, else by Slurm's variables, else a process by itself. ConfigError if these contradict themselves."""
    if worker_hosts:
        return Task(tuple(worker_hosts.split(",")), task_index)
    return _from_tf_config() or _from_slurm() or Task(("localhost",), 0)


def from_jobs(jobs: Mapping[str, Sequence[str]], kind: str, index: int) -> Task:
    """Finds a task, by its kind and index, in the cluster of TF_CONFIG: {kind: host:port of its tasks}. The chief comes
    before the workers, and no evaluator trains. ConfigError for other kinds, bad hosts, or if there is no such task."""
    if others := sorted(job for job, hosts in jobs.items() if hosts and job not in (*_JOBS, "evaluator")):
        raise errors.ConfigError(
            f"TF_CONFIG has the job {others[0]!a:.200}, for which there is no use here. Use chief and worker only."
        )
    hosts = tuple(host for job in _JOBS for host in jobs.get(job, ()))
    rules.check_hosts(hosts, f"TF_CONFIG={str(jobs)!a:.200}")
    if kind not in _JOBS or not 0 <= index < len(jobs.get(kind, ())):
        raise errors.ConfigError(
            f"TF_CONFIG says that this is {kind!a:.200} {index}, but only the chief and workers of its cluster "
            f"{str(jobs)!a:.200} train. Start the program there (with an evaluator: train_and_evaluate of Estimators)."
        )
    return Task(hosts, sum(len(jobs.get(job, ())) for job in _JOBS[: _JOBS.index(kind)]) + index)


def _from_tf_config() -> Task | None:
    text = os.environ.get("TF_CONFIG", "")
    try:
        content = json.loads(text or "{}")
        if not (jobs := content.get("cluster", {})):
            return None
        for job, hosts in jobs.items():
            if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
                raise TypeError(f"the hosts of {job} are no list of texts")
        if not isinstance(kind := content["task"]["type"], str):
            raise TypeError("the task's type is no text")
        index = _number("the task's index", str(content["task"]["index"]))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:  # bad JSON, or of another form
        raise errors.ConfigError(
            f"TF_CONFIG={text!a:.200} cannot be understood ({type(error).__name__}: {str(error)!a:.200}). It must be "
            'as in {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'
        ) from None
    return from_jobs(jobs, kind, index)


def _from_slurm() -> Task | None:
    variable = os.environ.get
    tasks_text, nodes_text = variable("SLURM_STEP_NUM_TASKS", "1"), variable("SLURM_STEP_NODELIST")
    if tasks_text == "1" or nodes_text is None:
        return None
    try:
        tasks = _number("SLURM_STEP_NUM_TASKS", tasks_text)
        index = _number("SLURM_PROCID", variable("SLURM_PROCID"))
        counts = _tasks_per_node(variable("SLURM_STEP_TASKS_PER_NODE"))
        nodes = _nodes(nodes_text)
        if len(nodes) != len(counts) or sum(counts) != tasks or index >= tasks:
            raise ValueError(f"{tasks} tasks, of which this is number {index}, are not {counts[:9]} on {nodes[:9]}")
    except ValueError as error:
        raise errors.ConfigError(
            f"Slurm's variables cannot be understood: {str(error)!a:.200}. Give --worker_hosts and --task_index."
        ) from None
    # as srun lays tasks out by default; in another order a worker finds at its address that it is not there
    places = [(node, _SLURM_PORT + i) for node, count in zip(nodes, counts, strict=True) for i in range(count)]
    return Task(tuple(f"{node}:{port}" for node, port in places), index)


def _number(name: str, text: str | None) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text or ""):
        raise ValueError(f"{name} is {text!r}, not a number" if text else f"{name} is not set")
    return int(text)


def _tasks_per_node(text: str | None) -> list[int]:
    """Returns [2, 2, 1] for 2(x2),1."""
    parts = [re.fullmatch(r"([0-9]{1,4})(?:\(x([0-9]{1,4})\))?", part) for part in (text or "").split(",")]
    if not all(parts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not as in 2(x2),1")
    return [int(part[1]) for part in parts for _ in range(int(part[2] or 1))]


def _nodes(text: str) -> list[str]:
    """Returns ["n1", "n2", "m"] for n[1-2],m."""
    nodes: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        match = re.fullmatch(rf"([\w.-]+)(?:\[({_RANGE}(?:,{_RANGE})*)\])?", part, re.ASCII)
        if not match:
            raise ValueError(f"SLURM_STEP_NODELIST is {text!r}, not as in n[1-2],m")
        prefix, ranges = match[1], match[2]
        nodes += [] if ranges else [prefix]
        for first, last in re.findall(_RANGE, ranges or ""):
            nodes += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return nodes
