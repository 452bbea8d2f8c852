"""Failure detection: which worker of a cluster is missing, has failed or was started again."""

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.board import WorkerState, WorkerStatus
from tower_train.cluster.task import Task
from tower_train.console import say
from tower_train.graph import progress

LOST_CONNECTION = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError
# Errors of a step in which another worker does not take part.
LOST_WORKER = (
    *LOST_CONNECTION, tf.errors.CancelledError, tf.errors.InternalError, tf.errors.FailedPreconditionError
)  # fmt: skip

_AGREED = (WorkerState.TRAINING, WorkerState.DONE)
_ENDED = (WorkerState.DONE, WorkerState.OVER, WorkerState.GONE)
_OF_ALL = (errors.NonFiniteError.exit_status, errors.MirrorError.exit_status)  # what no other group is spared
_REMIND_SECS = 30.0  # between lines about a worker that has not started
_RESTART = (
    "The same command on every machine, or the return of the missing one with --wait_for_workers, goes on from the "
    "last checkpoint."
)
_AGAIN = "a program that calls train() must be started again. Both then go on from the last checkpoint."
_WAITING = f"--wait_for_workers: python -m tower_train starts itself again; {_AGAIN}"
RESIZES = f"--elastic: python -m tower_train starts itself again, with those that are there; {_AGAIN}"


class FailureDetector:
    """Decides from the workers' statuses who is missing. The chief watches all workers, the others the chief.

    Args:
      task: this process's.
      worker_timeout_secs: seconds without a heartbeat after which a worker that had started is missing.
      start_timeout_secs: seconds after which a worker that has not started is missing.
      waits_for_start: until all have agreed, wait for absent workers without a limit.
      clock: seconds since some moment.
      next_step: advice after a failure; None: that of a run.
      is_elastic: the others go on without a lost worker, and a waiting one gives a chief time to come back.

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
        self._is_elastic, self._named = is_elastic, set()
        self.statuses = (WorkerStatus(),) * len(task.hosts)
        self._last_heartbeats = [clock()] * len(task.hosts)
        self._last_reminder = clock()
        usual = RESIZES if is_elastic else _WAITING if waits_for_start else _RESTART
        self.next_step = next_step or f"The step under way is not saved. {usual}"

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
        others = []
        if self._task.is_chief:
            if self._is_elastic:
                self._name_mistaken(mine)
            if mine.state not in (WorkerState.DONE, WorkerState.OVER):
                is_watched = mine.members or [not self._is_elastic] * len(self.statuses)
                others = [i for i in range(1, len(self.statuses)) if is_watched[i]]
        elif self.statuses[0].state is not WorkerState.OVER:
            others = [0]
        elif mine.state is WorkerState.STARTING:  # that was an earlier training of both
            return self._failure_to_start(0)
        return next(filter(None, (self._failure_of(i, mine) for i in others)), None) or self._failure_of_stalled(mine)

    def ready(self, mine: WorkerStatus) -> list[int]:
        """Returns the tasks that could train with this one, the chief, and do not yet."""
        outside = set(range(1, len(self.statuses))).difference(mine.group)
        return [i for i in sorted(outside) if self.statuses[i].state is WorkerState.READY and not self.is_silent(i)]

    def is_gone(self, worker: int, mine: WorkerStatus) -> bool:
        """Returns whether a worker's start, with which this worker, the chief, trained, is over."""
        status = self.statuses[worker]
        has_ended = status.state is WorkerState.FAILED or status.start_id != mine.members[worker]
        return has_ended or self.is_silent(worker)

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
            return errors.WorkerError(f"{name} was started again at step {mine.step}. {self.next_step}")
        if status.state is WorkerState.FAILED:
            if may_come_back and not status.has_mistake and not status.is_final:
                return None
            goes_on_without = self._is_elastic and worker and status.exit_status not in _OF_ALL
            exit_status = errors.WorkerError.exit_status if goes_on_without else status.exit_status
            text = status.failure if worker == 0 else _with_name(name, status.failure)
            return errors.WorkerError(text, exit_status, status.is_final)
        if status.state in _ENDED and mine.waiting_secs > self.worker_timeout_secs:
            return errors.WorkerError(
                f"{name} has ended after step {status.step}, but step {mine.step + 1} waits for it. Let all workers do "
                "as many steps.", errors.ConfigError.exit_status,
            )  # fmt: skip
        if not status.start_id or (may_come_back and self.is_silent(worker)):
            return self._failure_to_start(worker)
        if self.is_silent(worker):
            return errors.WorkerError(
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
        by_themselves = {i: each for i, each in late.items() if each.stalled != progress.FOR_AVERAGING}
        without_input = {i: each for i, each in by_themselves.items() if each.stalled == progress.FOR_INPUT}
        stuck = without_input or by_themselves or (late if len(late) == len(rows) else {})
        if not stuck:
            return None
        who = "; ".join(f"{self._task.name(i)} waits for {each.stalled}" for i, each in stuck.items())
        secs = min(each.stalled_secs for each in late.values())
        return errors.WorkerError(
            f"Step {mine.step + 1} stands still, for {secs:.0f} s since that was seen: {who}. {self.next_step}"
        )

    def _failure_to_start(self, worker: int) -> errors.WorkerError | None:
        name, secs = self._task.name(worker), self._silent_secs(worker)
        if secs > self._start_timeout and not self._waits_for_start:
            return errors.WorkerError(f"{name} has not started for {secs:.0f} s. {self.next_step}", is_final=True)
        if self._clock() - self._last_reminder > _REMIND_SECS:
            self._last_reminder = self._clock()
            say(f"*** Waiting for {name} ...")
        return None

    def _name_mistaken(self, mine: WorkerStatus) -> None:
        """Says once, in the chief of an elastic cluster, why a worker outside of the group has failed."""
        for i, status in enumerate(self.statuses):
            text = _with_name(self._task.name(i), status.failure)
            if i and i not in mine.group and status.has_mistake and text not in self._named:
                self._named.add(text)
                say(f"*** {text}")


def _with_name(name: str, failure: str) -> str:
    return failure if name in failure else f"{name}: {failure}"


def may_be_anothers(error: BaseException) -> bool:
    """Returns whether another worker may be behind an error: TensorFlow's, or of a session closed for that."""
    is_of_variables = isinstance(error, tf.errors.FailedPreconditionError) and not is_of_earlier_start(error)
    return isinstance(error, (tf.errors.OpError, RuntimeError)) and not is_of_variables


def is_of_earlier_start(error: tf.errors.OpError) -> bool:
    """Returns whether it is of a group of devices of an earlier start of a worker; nobody else may notice."""
    return "incarnation" in error.message


def is_of_sizes(error: BaseException) -> bool:
    """Returns whether workers gave tensors of different sizes to one operation, by either error of TensorFlow's."""
    text = error.message if isinstance(error, tf.errors.OpError) else ""
    return "Shape mismatch in the collective" in text or "Tensor Size Mismatch" in text


def is_of_another_session(error: BaseException, target: str) -> bool:
    """Returns whether a session outside of the cluster has refused operations between workers (Cluster.device)."""
    text = error.message if isinstance(error, tf.errors.InvalidArgumentError) else ""
    return bool(target) and "/job:worker" in text and "/job:localhost" in text
