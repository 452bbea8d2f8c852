"""Elastic membership: a cluster that goes on without lost workers, and takes in those that come later.

The group is fixed for one start: a collective operation waits for all of its group. So each change of the group is a
new start of all of it, from the last checkpoint. A host's index in the list of all hosts is its identity; its rank, and
so its part of a step, follows from the present hosts.
"""

import dataclasses
import time

from tower_train import errors
from tower_train.cluster import failures
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.membership import LeaveAtOnce, Membership, exit_at_once
from tower_train.cluster.roster import Memory, Roster
from tower_train.cluster.single_process import RESIZED, RunOver
from tower_train.cluster.status_board import WorkerState
from tower_train.cluster.task import Task
from tower_train.console import say
from tower_train.graph.devices import Devices

_LINGER_SECS = 10  # for those that wait for a place to hear that the run is over
_LEAVING = ("SIGTERM", "SIGINT")  # of a worker that is not the chief: the others go on without it


class ElasticMembership(Membership):
    """As Membership, among the hosts that are present.

    Until workers agree, `devices` are those of the expected group; agreeing gives those of the actual one.

    Args:
      task, devices, leave_at_once: as for Membership.
      detector: one that is elastic.
      sizes: least and most workers.
      start_timeout_secs: as for Roster.
    """

    def __init__(
        self, task: Task, devices: Devices, detector: FailureDetector, leave_at_once: LeaveAtOnce,
        sizes: tuple[int, int], start_timeout_secs: float,
    ):  # fmt: skip
        super().__init__(task, devices, detector, leave_at_once)
        self._memory = Memory.of_environment()
        self._roster = Roster(task, sizes, self._memory, detector.worker_timeout_secs, start_timeout_secs)
        self._first_step, self._grows, self._leaving, self._told = None, False, set(), ""
        self._most = sizes[1]
        self._take_place(self._memory.expected(task, sizes))

    def _take_place(self, group) -> None:
        """Makes `devices` those of this task's place in a group of tasks."""
        place = {"num_workers": len(group), "worker": group.index(self.task.index)}
        if any(getattr(self.devices, name) != value for name, value in place.items()):
            self.devices = dataclasses.replace(self.devices, **place)

    @property
    def group(self) -> tuple[int, ...]:
        """The tasks that train together; empty before they have agreed."""
        return tuple(i for i, start_id in enumerate(self._status.members) if start_id)

    @property
    def is_to_resize(self) -> bool:
        return self._grows

    def after_run(self, run_context, run_values):
        super().after_run(run_context, run_values)
        self._first_step = self._first_step or time.monotonic()

    def agree(self, about, steps_done, last_step):
        self._memory.check()
        steps = super().agree(about, steps_done, last_step)
        self._take_place(self.group)
        return steps

    def _await_others(self):
        while (group := self._roster.choose(self._waiting())) is None:
            self._pause()
        statuses = self._detector.statuses
        return tuple(
            (statuses[i].start_id if i else self._status.start_id) if i in group else "" for i in range(len(statuses))
        )

    def _waiting(self) -> list[int]:
        """The tasks that are ready to train with the chief, which this is, and do not yet; names those that cannot."""
        waiting = []
        for i, status in enumerate(self._detector.statuses):
            if i == 0 or self._detector.is_silent(i) or i in self.group:
                continue
            if status.state is WorkerState.READY:
                waiting.append(i)
            if status.state is WorkerState.FAILED and status.exit_status != errors.WorkerError.exit_status:
                name = self.task.name(i)
                self._roster.name_once(status.failure if name in status.failure else f"{name}: {status.failure}")
        return waiting

    def _note_chief(self, chief):
        if chief.state is WorkerState.OVER and chief.stopped_by != RESIZED:
            self._end_watch()
            self._tell(state=WorkerState.GONE)
            self._exchange()
            say(f"*** The run has ended at step {chief.step} ({chief.stopped_by}), without this worker.")
            raise RunOver(chief.stopped_by, chief.step)
        if chief.state is WorkerState.TRAINING and self._told != chief.start_id:
            self._told = chief.start_id
            others = sum(map(bool, chief.members))
            say(f"*** {others} of at most {self._most} train, at step {chief.step}: waiting for a place among them.")

    def _look(self):
        if self.task.is_chief and self._status.state is WorkerState.TRAINING:
            secs = None if self._first_step is None else time.monotonic() - self._first_step
            self._grows = self._grows or self._roster.is_to_grow(self.group, self._waiting(), secs)

    def fail(self, failure):
        self.remember(failure)
        super().fail(failure)

    def remember(self, failure):
        if self.task.is_chief:
            memory = self._chiefs_memory()
            self._note(next_group=memory.group)
        else:
            has_stepped = self._first_step is not None
            memory = self._memory.after(has_stepped, self.group, (), self._chief.next_group or self.group)
        failure.environment = memory.environment()

    def _chiefs_memory(self) -> Memory:
        gone = {i for i in self.group if i and self._is_away(i)} | self._leaving
        again = {i for i in self.group if i and self._detector.statuses[i].start_id != self._status.members[i]}
        expected = {*self.group, *self._waiting()} - gone
        return self._memory.after(self._first_step is not None, self.group, gone | again, expected)

    def _is_away(self, worker: int) -> bool:
        """Returns whether a worker will not restart itself, as far as the chief can tell."""
        status = self._detector.statuses[worker]
        has_failed = status.state is WorkerState.FAILED and status.exit_status != errors.WorkerError.exit_status
        return has_failed or self._detector.is_silent(worker)

    def _reason_of_all(self, stopped_by):
        others = {i: self._detector.statuses[i].stopped_by for i in self.group if i}
        self._leaving = {i for i, reason in others.items() if reason in _LEAVING}
        if stopped_by in (None, RESIZED):
            others = [reason for i, reason in others.items() if reason and i not in self._leaving]
            stopped_by = others[0] if others else RESIZED
        self._note(next_group=self._chiefs_memory().group)
        return stopped_by

    def leave(self, stopped_by):
        of_all = super().leave(stopped_by)
        if of_all != RESIZED:
            self._linger()
        elif stopped_by in _LEAVING and not self.task.is_chief:
            return stopped_by
        return of_all

    def _linger(self) -> None:
        """Waits, in the chief, until workers that wait for a place have learned that the run is over."""
        deadline = time.monotonic() + _LINGER_SECS
        while self.task.is_chief and self._waiting() and time.monotonic() < deadline:
            self._pause()

    def resized(self) -> errors.WorkerError:
        """Returns the error with which all restart themselves, in another number, once they have left."""
        leaving, waiting = sorted(self._leaving), self._waiting() if self.task.is_chief else []
        names = ", ".join(map(self.task.name, leaving or waiting))
        what = "was told to end" if leaving else "waits for a place"
        why = f"{names} {what}" if names else "the chief goes on with other workers"
        error = errors.WorkerError(f"Saved at step {self._status.step}, as {why}. {failures.RESIZES}")
        self.remember(error)
        return error


def join_elastic(
    task: Task, devices: Devices, worker_timeout_secs: float, start_timeout_secs: float, sizes: tuple[int, int],
    leave_at_once: LeaveAtOnce = exit_at_once,
) -> ElasticMembership:  # fmt: skip
    """Makes this process a member of an elastic cluster, as membership.join does of another.

    Args:
      sizes: least and most workers.
      task, devices, worker_timeout_secs, start_timeout_secs, leave_at_once: as for membership.join.

    Raises:
      RunError: the server cannot be started.
    """
    detector = FailureDetector(
        task, worker_timeout_secs, start_timeout_secs, False, next_step=failures.ELASTIC, is_elastic=True
    )
    return ElasticMembership(task, devices, detector, leave_at_once, sizes, start_timeout_secs)
