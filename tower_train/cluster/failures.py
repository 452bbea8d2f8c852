"""Failure detection: which worker of a cluster is missing, has failed or was started again."""

import time
from collections.abc import Callable, Sequence

from tower_train import errors
from tower_train.cluster.status_board import WorkerState, WorkerStatus
from tower_train.cluster.task import Task
from tower_train.console import say
from tower_train.graph import progress

_AGREED = (WorkerState.TRAINING, WorkerState.DONE)
_ENDED = (WorkerState.DONE, WorkerState.OVER, WorkerState.GONE)
_OF_ALL = (errors.NonFiniteError.exit_status, errors.MirrorError.exit_status)  # what no other group is spared
_REMIND_SECS = 30.0  # between lines about a worker that has not started
_RESTART = (
    "The same command on every machine, or the return of the missing one with --wait_for_workers, goes on from the "
    "last checkpoint."
)
RESIZES = (
    "--elastic: python -m tower_train starts itself again, with those that are there; a program that calls train() "
    "must be started again. Both then go on from the last checkpoint."
)
ELASTIC = f"The step under way is not saved. {RESIZES}"
_WAITING = (
    "--wait_for_workers: python -m tower_train starts itself again; a program that calls train() must be started "
    "again. Both then go on from the last checkpoint."
)


class FailureDetector:
    """Decides from the workers' statuses who is missing. The chief watches all workers, the others the chief.

    Args:
      task: this process's.
      worker_timeout_secs: seconds without a heartbeat after which a worker that had started is missing.
      start_timeout_secs: seconds after which a worker that has not started is missing.
      waits_for_start: until all have agreed, wait for absent workers without a limit.
      clock: seconds since some moment.
      next_step: advice after a failure; None: that of a run.
      is_elastic: the others go on without a lost worker, and who waits gives a chief time to come back.

    Attributes:
      statuses: over workers, as last read; workers that are not the chief know the chief's only.
      worker_timeout_secs: as given.
      next_step: advice after a failure, for messages.
    """

    def __init__(
        self, task: Task, worker_timeout_secs: float, start_timeout_secs: float, waits_for_start: bool,
        clock: Callable[[], float] = time.monotonic, next_step: str | None = None, is_elastic: bool = False,
    ):  # fmt: skip
        self._task, self._clock, self.worker_timeout_secs = task, clock, worker_timeout_secs
        self._start_timeout, self._waits_for_start = start_timeout_secs, waits_for_start
        self._is_elastic = is_elastic
        self.statuses = (WorkerStatus(),) * len(task.hosts)
        self._last_heartbeats = [clock()] * len(task.hosts)
        self._last_reminder = clock()
        self.next_step = next_step or f"The step under way is not saved. {_WAITING if waits_for_start else _RESTART}"

    def note(self, statuses: Sequence[WorkerStatus], mine: WorkerStatus) -> None:
        """Notes the statuses read from the board, and this worker's own.

        In the chief, a status for another start of the chief counts as that of a worker that has not started.
        """
        if self._task.is_chief:
            statuses = [status if status.chief == mine.start_id else WorkerStatus() for status in statuses]
        for i, (status, before) in enumerate(zip(statuses, self.statuses, strict=False)):
            if (status.start_id, status.heartbeat) != (before.start_id, before.heartbeat):
                self._last_heartbeats[i] = self._clock()
        self.statuses = (*statuses, *self.statuses[len(statuses) :])

    def find(self, mine: WorkerStatus) -> errors.WorkerError | None:
        """Returns the failure that ends this worker, whose status is given; None while all is well."""
        if self._task.is_chief:
            others = self._watched(mine) if mine.state not in (WorkerState.DONE, WorkerState.OVER) else []
        elif self.statuses[0].state is not WorkerState.OVER:
            others = [0]
        elif mine.state is WorkerState.STARTING:  # that was an earlier training of both
            return self._failure_to_start(0)
        else:
            others = []
        return next(filter(None, (self._failure_of(i, mine) for i in others)), None) or self._failure_of_stalled(mine)

    def _watched(self, mine: WorkerStatus) -> list[int]:
        """The other workers that the chief trains or waits with."""
        return [i for i in range(1, len(self.statuses)) if (mine.members[i] if mine.members else not self._is_elastic)]

    def is_gone(self, worker: int, mine: WorkerStatus) -> bool:
        """Returns whether a worker's start, with which this worker, the chief, trained, is over."""
        status = self.statuses[worker]
        is_failed = status.state is WorkerState.FAILED
        return is_failed or status.start_id != mine.members[worker] or self.is_silent(worker)

    def is_silent(self, worker: int) -> bool:
        """Returns whether a worker has had no heartbeat for worker_timeout_secs."""
        return self._silent_secs(worker) > self.worker_timeout_secs

    def _silent_secs(self, worker: int) -> float:
        return self._clock() - self._last_heartbeats[worker]

    def _failure_of(self, worker: int, mine: WorkerStatus) -> errors.WorkerError | None:
        status, name, has_agreed = self.statuses[worker], self._task.name(worker), mine.state in _AGREED
        # Nothing is lost before the first step: missing workers may come back.
        may_come_back = (self._waits_for_start or self._is_elastic) and not has_agreed
        if has_agreed and status.start_id != (mine.members[worker] if mine.members else mine.chief):
            return _error(f"{name} was started again at step {mine.step}. {self.next_step}")
        if status.state is WorkerState.FAILED:
            exit_status = status.exit_status
            if may_come_back and exit_status == errors.WorkerError.exit_status and not status.is_final:
                return None
            if self._is_elastic and worker and exit_status not in _OF_ALL:
                exit_status = errors.WorkerError.exit_status
            is_named = worker == 0 or name in status.failure
            error = _error(status.failure if is_named else f"{name}: {status.failure}", exit_status)
            error.is_final = status.is_final
            return error
        if status.state in _ENDED and mine.waiting_secs > self.worker_timeout_secs:
            return _error(
                f"{name} has ended after step {status.step}, but step {mine.step + 1} waits for it. Let all workers do "
                "as many steps.", errors.ConfigError.exit_status,
            )  # fmt: skip
        if not status.start_id or (may_come_back and self.is_silent(worker)):
            return self._failure_to_start(worker)
        if self.is_silent(worker):
            return _error(
                f"{name} is missing: no sign of life for {self._silent_secs(worker):.0f} s, last seen at step "
                f"{status.step}. {self.next_step}"
            )
        return None

    def _failure_of_stalled(self, mine: WorkerStatus) -> errors.WorkerError | None:
        """Returns the failure of live workers whose step stands still, worker_timeout_secs after they reported that.

        The other workers' steps stand still too: they wait for all-reduces with these.
        """
        if mine.state is not WorkerState.TRAINING:
            return None
        rows = {i: each for i, each in enumerate(self.statuses) if not mine.members or mine.members[i]}
        late = {i: each for i, each in rows.items() if each.stalled_secs > self.worker_timeout_secs}
        if {mine.stalled, *(each.stalled for each in late.values())} == {progress.FOR_PROGRAM}:
            return None  # nobody waits for them
        own = {i: each for i, each in late.items() if each.stalled != progress.FOR_AVERAGING}
        stuck = {i: each for i, each in own.items() if each.stalled == progress.FOR_INPUT} or own
        if not stuck and len(late) < len(rows):
            return None
        who = "; ".join(f"{self._task.name(i)} waits for {each.stalled}" for i, each in (stuck or late).items())
        secs = min(each.stalled_secs for each in late.values())
        return _error(
            f"Step {mine.step + 1} stands still, for {secs:.0f} s since that was seen: {who}. {self.next_step}"
        )

    def _failure_to_start(self, worker: int) -> errors.WorkerError | None:
        name, secs = self._task.name(worker), self._silent_secs(worker)
        if secs > self._start_timeout and not self._waits_for_start:
            error = _error(f"{name} has not started for {secs:.0f} s. {self.next_step}")
            error.is_final = True
            return error
        if self._clock() - self._last_reminder > _REMIND_SECS:
            self._last_reminder = self._clock()
            say(f"*** Waiting for {name} ...")
        return None


def _error(text: str, status: int = errors.WorkerError.exit_status) -> errors.WorkerError:
    error = errors.WorkerError(text)
    error.exit_status = status
    return error
