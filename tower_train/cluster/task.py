"""This process's task among several that train together: from the command line, TF_CONFIG or Slurm."""

import dataclasses
import os

import tensorflow as tf

from tower_train import errors

_JOBS = ("chief", "master", "worker")  # of TF_CONFIG, in the order in which their tasks are counted


@dataclasses.dataclass(frozen=True)
class Task:
    """One worker of a cluster.

    Attributes:
      hosts: over workers, host:port; the first is the chief.
      index: which of them this process is.
    """

    hosts: tuple[str, ...]
    index: int

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return len(self.hosts) == 1

    def name(self, index: int) -> str:
        """A worker's name for people."""
        return f"worker {index} ({'the chief, ' if index == 0 else ''}{self.hosts[index]})"


def find_task(worker_hosts: str | None, task_index: int | None) -> Task:
    """Finds this process's task: --worker_hosts, else TF_CONFIG, else Slurm's variables, else a process by itself.

    Args:
      worker_hosts: host:port of all workers, joined by commas.
      task_index: this process's index among them.

    Raises:
      ConfigError: the description of the task contradicts itself.
    """
    if worker_hosts:
        return Task(tuple(worker_hosts.split(",")), task_index)
    return _from_tf_config() or _from_slurm() or Task(("localhost",), 0)


def _from_tf_config() -> Task | None:
    try:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        jobs, task, index = resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    except (ValueError, TypeError, AttributeError) as error:  # of bad JSON, or of JSON of another form
        raise errors.ConfigError(
            f"TF_CONFIG={os.environ.get('TF_CONFIG')!r} cannot be understood ({error}). It must be as in "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'
        ) from None
    if not jobs:
        return None
    if others := sorted(set(jobs) - set(_JOBS)):
        raise errors.ConfigError(
            f"TF_CONFIG has the job {others[0]}, for which there is no use here. Use chief and worker only."
        )
    hosts = tuple(host for job in _JOBS for host in jobs.get(job, []))
    if task not in jobs or index is None or not 0 <= index < len(jobs[task]):
        raise errors.ConfigError(f"TF_CONFIG says that this is {task} {index}, which its cluster {jobs} has not.")
    return Task(hosts, sum(len(jobs.get(job, [])) for job in _JOBS[: _JOBS.index(task)]) + index)


def _from_slurm() -> Task | None:
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "SLURM_STEP_NODELIST" not in os.environ:
        return None
    # It looks for GPUs only to share them out among tasks; which a task gets is Slurm's or the user's to say.
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
    )
    hosts, (_, index) = resolver.cluster_spec().as_dict()["worker"], resolver.get_task_info()
    here = os.environ.get("SLURMD_NODENAME", hosts[index].partition(":")[0])
    if hosts[index].partition(":")[0] != here:
        raise errors.ConfigError(
            f"Slurm runs task {index} on {here}, but TensorFlow takes it to be on {hosts[index]}, as it sorts nodes by "
            "name. Give --worker_hosts and --task_index=$SLURM_PROCID."
        )
    return Task(tuple(hosts), index)
