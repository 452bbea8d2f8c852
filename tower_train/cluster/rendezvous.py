"""The rendezvous of a cluster: the chief's choice of the workers that train together, before each start.

A group is fixed for one start: a collective operation waits for all of its group. So each change of an elastic cluster
is a new start of all of it, from the last checkpoint. A host's index in the list of all hosts is its identity; its
rank, and so its part of a step, follows from the hosts of the group.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tower_train import errors
from tower_train.cluster.task import Task
from tower_train.console import say

RESIZED = "another number of workers"  # what ends the steps of an elastic cluster that goes on in another size
LEAVING = ("SIGTERM", "SIGINT")  # of a worker that is not the chief: the others of an elastic cluster go on without it

_VARIABLE = "TOWER_TRAIN_ELASTIC"
_MOST_STRIKES = 5
_MOST_IDLE_STARTS = 10
_REMIND_SECS = 30.0


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a process that restarts itself, in an environment variable.

    Attributes:
      group: the tasks that are expected to train; empty if nothing is known.
      strikes: {task: number of losses in a row before the first step of a start}; the chief's are all such starts.
    """

    group: tuple[int, ...] = ()
    strikes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_environment(cls) -> "Memory":
        """Reads what `environment` wrote, if it did."""
        content = json.loads(os.environ.get(_VARIABLE, "{}"))
        strikes = {int(task): count for task, count in content.get("strikes", {}).items()}
        return cls(tuple(content.get("group", ())), strikes)

    def environment(self) -> dict[str, str]:
        """The environment variable for the next start."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}

    def after(
        self, has_stepped: bool, group: Collection[int], lost: Collection[int], expected: Collection[int]
    ) -> "Memory":  # fmt: skip
        """Returns the memory at the end of a start of `group`, which lost some and expects others next."""
        strikes = {task: count for task, count in self.strikes.items() if not has_stepped or task not in group}
        if not has_stepped:
            strikes |= {task: strikes.get(task, 0) + 1 for task in {0, *lost}}
        return Memory(tuple(sorted(expected)), strikes)

    def expected(self, task: Task, sizes: tuple[int, int]) -> list[int]:
        """Returns a group of allowed size with this task, if possible the one that is expected to train."""
        (least, most), tasks = sizes, range(len(task.hosts))
        group = [i for i in self.group if i in tasks][:most] or list(tasks[:most])
        group += [i for i in tasks if i not in group][: max(0, least - len(group))]
        return sorted(group if task.index in group else [*group[:-1], task.index])

    def check_idle_starts(self) -> None:
        """Raises WorkerError if start after start ends before a step."""
        if (idle_starts := self.strikes.get(0, 0)) >= _MOST_IDLE_STARTS:
            raise errors.WorkerError(
                f"{idle_starts} starts in a row ended before their first step. Look for the reason in the lines "
                "of all workers, then start all again.", is_final=True,
            )  # fmt: skip


class Rendezvous:
    """Chooses who trains. The chief always does.

    Args:
      task: this process's.
      sizes: least and most workers of an elastic cluster; None: all train, and end together.
      memory: of the start before.
      settle_secs: seconds without a new worker after which fewer than the most, or than the expected, begin; and least
        seconds of training before a start ends for later workers.
      start_timeout_secs: seconds to wait for the least number of workers.
      clock: seconds since some moment.

    Attributes:
      is_elastic: whether there are sizes.
      most: workers that train together.
      memory: as given.
      expected: the tasks that will train if nothing has changed.
      leaving: the workers that were told to end, once `reason_of_all` is known.
    """

    def __init__(
        self, task: Task, sizes: tuple[int, int] | None, memory: Memory, settle_secs: float, start_timeout_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.is_elastic, self.memory, self.leaving = sizes is not None, memory, set()
        self._least, self.most = sizes = sizes or (len(task.hosts), len(task.hosts))
        self.expected = memory.expected(task, sizes)
        self._task, self._settle, self._start_timeout, self._clock = task, settle_secs, start_timeout_secs, clock
        self._began = self._changed = self._reminded = clock()
        self._ready: set[int] = set()
        self._named: set[int] = set()

    def choose(self, ready: Collection[int]) -> tuple[int, ...] | None:
        """Chooses the tasks that begin, in order; None to wait for more.

        Args:
          ready: the tasks that could begin now, without the chief.

        Raises:
          WorkerError: there were too few for too long, in an elastic cluster; in others each missing one is named.
        """
        ready, now = {0, *self._admissible(ready)}, self._clock()
        if ready != self._ready:
            self._ready, self._changed = ready, now
        is_full = len(ready) >= self.most
        is_as_expected = bool(self.memory.group) and ready.issuperset(self.memory.group)
        if len(ready) >= self._least and (is_full or is_as_expected or now - self._changed > self._settle):
            known = [task for task in sorted(ready) if task in self.memory.group or task == 0]
            return tuple(sorted((known + sorted(ready.difference(known)))[: self.most]))
        there = f"{len(ready)} of {self._least} to {self.most} workers are there"
        if self.is_elastic and len(ready) < self._least and now - self._began > self._start_timeout:
            raise errors.WorkerError(
                f"{there}, and no more have come for {now - self._began:.0f} s. The last checkpoint stays: start all "
                f"again when at least {self._least} can come, or give a smaller MIN in --elastic=MIN:MAX.",
                is_final=True,
            )
        if self.is_elastic and now - self._reminded > _REMIND_SECS:
            self._reminded = now
            say(f"*** Waiting: {there}.")
        return None

    def is_to_grow(self, group: Sequence[int], ready: Collection[int], trained_secs: float | None) -> bool:
        """Returns whether a start of `group` ends for workers that wait for a place.

        Args:
          group: the tasks that train.
          ready: those that wait.
          trained_secs: seconds since the end of the first step; None before that.
        """
        has_trained = trained_secs is not None and trained_secs > self._settle
        return has_trained and len(group) < self.most and bool(self._admissible(ready))

    def reason_of_all(self, stopped_by: str | None, others: Mapping[int, str | None]) -> str | None:
        """Returns what ended the run, in the chief, given what ended its own steps and those of the other workers."""
        if self.is_elastic:
            self.leaving = {worker for worker, reason in others.items() if reason in LEAVING}
        reasons = [stopped_by, *(reason for worker, reason in others.items() if worker not in self.leaving)]
        default = RESIZED if self.is_elastic else None
        return next((reason for reason in reasons if reason not in (None, RESIZED)), default)

    def _admissible(self, ready: Collection[int]) -> list[int]:
        """Returns the workers that were not lost too often; names the others once."""
        barred = {task for task in ready if self.memory.strikes.get(task, 0) >= _MOST_STRIKES}
        for task in sorted(barred - self._named):
            self._named.add(task)
            say(
                f"*** {self._task.name(task)} was lost {self.memory.strikes[task]} times in a row before its first "
                "step, and is not taken in again. Look for the reason in its lines, then start all again."
            )
        return [task for task in ready if task not in barred]
