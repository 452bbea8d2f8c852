"""The rendezvous of a cluster: the chief's choice of the workers that train together, before each start.

A group is fixed for one start, as a collective operation waits for all of its group. So each change of an elastic
cluster is a new start of all of it, from the last checkpoint. A host is known by its index in the list of all hosts;
its part of a step follows from its rank in the group.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tower_train import errors
from tower_train.cluster.task import Policy, Task
from tower_train.console import say

RESIZED = "another number of workers"  # what ends the steps of an elastic cluster that goes on in another size
# reasons for which a worker leaves an elastic cluster; the others go on without it, unless it is the chief
LEAVING = ("SIGTERM", "SIGINT", "SIGHUP")

_VARIABLE = "TOWER_TRAIN_ELASTIC"
_MOST_IDLE_STARTS = 10
_REMIND_SECS = 30.0


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a process that restarts itself, in an environment variable."""

    group: tuple[int, ...] = ()  # the tasks that are expected to train; empty if nothing is known
    idle_starts: int = 0  # in a row, that ended before their first step
    lost: tuple[int, ...] = ()  # the tasks that have trained and are missing since

    @classmethod
    def from_environment(cls) -> "Memory":
        """Reads what `environment` wrote, if anything."""
        content = json.loads(os.environ.get(_VARIABLE, "{}"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})

    def environment(self) -> dict[str, str]:
        """The environment variable for the next start."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}


class Rendezvous:
    """Chooses who trains. The chief always does. memory: of the start before, if the cluster is elastic."""

    def __init__(
        self, task: Task, policy: Policy, memory: Memory | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._policy, self.memory, self._clock = policy, memory or Memory(), clock
        self.is_elastic = policy.sizes is not None  # fewer than all may train
        self.leaving: set[int] = set()  # the workers that were told to end, once `agreed_reason` is known
        self._least, self.most = policy.sizes or (len(task.hosts), len(task.hosts))
        # the tasks that will train if nothing has changed: an allowed number, this one among them
        self.expected = list(self.memory.group[: self.most])
        if task.index not in self.expected or len(self.expected) < self._least:  # nothing fitting is known
            self.expected = sorted({*range(self.most), task.index})[-self.most :]
        self._began = self._changed = self._reminded = clock()
        self._ready: set[int] = set()

    def choose(self, ready: Collection[int]) -> tuple[int, ...] | None:
        """Chooses the tasks that begin, in order, from those that are ready, besides the chief; None to wait for more.

        Raises WorkerError if start after start ended before a step, or an elastic cluster had too few for too long.
        """
        if self.memory.idle_starts >= _MOST_IDLE_STARTS:
            raise errors.WorkerError(
                f"{self.memory.idle_starts} starts in a row ended before their first step. Look for the reason in the "
                "lines of all workers, then start all again.",
                is_final=True,
            )
        ready, now = {0, *ready}, self._clock()
        if ready != self._ready:
            self._ready, self._changed = ready, now
        is_full, has_settled = len(ready) >= self.most, now - self._changed > self._policy.worker_timeout_secs
        # fewer than all begin if they are those of the last start, or if nobody else has come for a while
        is_as_expected = bool(self.memory.group) and ready.issuperset(self.memory.group)
        if len(ready) >= self._least and (is_full or is_as_expected or has_settled):
            return tuple(sorted(ready)[: self.most])
        if self.is_elastic:
            self._wait(f"{len(ready)} of {self._least} to {self.most} workers are there", now)
        return None

    def _wait(self, there: str, now: float) -> None:
        """Reports now and then who is there; WorkerError if they have been too few for too long."""
        waited = now - self._began
        if len(self._ready) < self._least and waited > self._policy.start_timeout_secs:
            raise errors.WorkerError(
                f"{there}, and no more have come for {waited:.0f} s. The last checkpoint stays: start all again when "
                f"at least {self._least} can come, or give a smaller MIN in --elastic=MIN:MAX.",
                is_final=True,
            )
        if now - self._reminded > _REMIND_SECS:
            self._reminded = now
            say(f"*** Waiting: {there}.")

    def is_to_grow(self, group: Sequence[int], ready: Collection[int], trained_secs: float | None) -> bool:
        """Returns whether the start of `group` ends for the tasks that are ready and wait for a place. trained_secs:
        seconds since the end of its first step; None before that."""
        # not at once: each change costs a start
        has_trained = trained_secs is not None and trained_secs > self._policy.worker_timeout_secs
        return has_trained and len(group) < self.most and bool(ready)

    def agreed_reason(self, stopped_by: str | None, others: Mapping[int, str | None]) -> str | None:
        """Returns what ended the run, in the chief, from what ended its own steps and those of the other workers."""
        if self.is_elastic:
            self.leaving = {worker for worker, reason in others.items() if reason in LEAVING}
        reasons = [stopped_by, *(reason for worker, reason in others.items() if worker not in self.leaving)]
        default = RESIZED if self.is_elastic else None
        return next((reason for reason in reasons if reason not in (None, RESIZED)), default)
