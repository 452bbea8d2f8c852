"""Failure detection: which worker of a cluster is missing, has failed or was started again."""

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.store import WorkerState, WorkerStatus, reason_unreached
from tower_train.cluster.task import Policy, Task
from tower_train.console import say

# Obstacles of a step that does not end, besides towers.
FOR_INPUT = "the input: the examples of this step have not come"
FOR_AVERAGING = "the averaging between devices, the update of the variables, or a session hook"
BETWEEN_STEPS = "what happens between steps"
FOR_PROGRAM = "its program or its input: it has no gradients for this step"

LOST_CONNECTION = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError
# Errors of a step in which another worker does not take part.
LOST_WORKER = (*LOST_CONNECTION, tf.errors.CancelledError, tf.errors.InternalError, tf.errors.FailedPreconditionError)

_AGREED = (WorkerState.TRAINING, WorkerState.DONE)
_ENDED = (WorkerState.DONE, WorkerState.OVER, WorkerState.GONE)
_OF_ALL = (errors.NonFiniteError.exit_status, errors.MirrorError.exit_status)  # another group would meet these too
_REMIND_SECS = 30.0  # between lines about a worker that has not started
_REACH_SECS = 1.0  # for a connection to one


class FailureDetector:
    """Decides from the workers' statuses who is missing. The chief watches all workers, the others the chief."""

    def __init__(self, task: Task, policy: Policy, clock: Callable[[], float] = time.monotonic):
        self._task, self._policy, self._clock, self._named = task, policy, clock, set()
        self.statuses = (WorkerStatus(),) * len(task.hosts)  # as last read; workers know the chief's only
        self._last_heartbeats = [clock()] * len(task.hosts)
        self._began = self._last_reminder = clock()
        self._reached = [("", "", 0.0)] * len(task.hosts)  # (start, reason why it is not, when that was seen)

    def note(self, statuses: Sequence[WorkerStatus], mine: WorkerStatus) -> None:
        """Notes the statuses read from the store, and this worker's own."""
        if self._task.is_chief:  # a status for another start of the chief is that of a worker that has not started
            statuses = [status if status.chief == mine.start_id else WorkerStatus() for status in statuses]
        for i, (status, before) in enumerate(zip(statuses, self.statuses, strict=False)):
            if (status.start_id, status.heartbeat) != (before.start_id, before.heartbeat):
                self._last_heartbeats[i] = self._clock()
        self.statuses = (*statuses, *self.statuses[len(statuses) :])

    def find(self, mine: WorkerStatus) -> errors.WorkerError | None:
        """Returns the failure that ends this worker, whose status is `mine`; None while all is well."""
        if self._task.is_chief:
            self._name_refused(mine)
            watched = mine.group or (() if self._policy.sizes else range(len(self.statuses)))
            watched = [] if mine.state in (WorkerState.DONE, WorkerState.OVER) else [i for i in watched if i]
        elif self.statuses[0].state is WorkerState.OVER and mine.state is WorkerState.STARTING:
            return self._failure_to_start(0)  # what is over is an earlier training of both
        else:
            watched = [0] if self.statuses[0].state is not WorkerState.OVER else []
        return next(filter(None, (self._find_failure(i, mine) for i in watched)), None) or self._find_stall(mine)

    def ready(self, mine: WorkerStatus) -> list[int]:
        """Returns the tasks that could train with this one, the chief, and do not yet."""
        outside = [i for i in range(1, len(self.statuses)) if i not in mine.group and not self.is_silent(i)]
        return [i for i in outside if self.statuses[i].state is WorkerState.READY and self._reaches(i)]

    def _reaches(self, worker: int) -> bool:
        """Returns whether a worker that has come can be reached from here; if not, reports it now and then."""
        start_id, why, looked_at = self._reached[worker]
        if start_id != self.statuses[worker].start_id or (why and self._clock() - looked_at > _REMIND_SECS):
            why = reason_unreached(self._task.hosts[worker], _REACH_SECS)
            self._reached[worker] = self.statuses[worker].start_id, why, self._clock()
            if why:
                say(f"*** {self._task.name(worker)} has come, but is not reached from the chief: {why}. Waiting.")
        return not why

    def newcomers(self) -> list[int]:
        """Returns the tasks that live and have not begun to train."""
        begun = (WorkerState.STARTING, WorkerState.READY)
        living = [i for i, status in enumerate(self.statuses) if i and status.start_id and not self.is_silent(i)]
        return [i for i in living if self.statuses[i].state in begun]

    def is_gone(self, worker: int, mine: WorkerStatus) -> bool:
        """Returns whether a worker's start, with which this worker, the chief, trained, is over."""
        status = self.statuses[worker]
        has_ended = status.state is WorkerState.FAILED or status.start_id != mine.members[worker]
        return has_ended or self.is_silent(worker)

    def is_silent(self, worker: int) -> bool:
        """Returns whether a worker has had no heartbeat for worker_timeout_secs."""
        return self._silent_secs(worker) > self._policy.worker_timeout_secs

    def _silent_secs(self, worker: int) -> float:
        return self._clock() - self._last_heartbeats[worker]

    def _find_failure(self, worker: int, mine: WorkerStatus) -> errors.WorkerError | None:
        status, name, has_agreed = self.statuses[worker], self._task.name(worker), mine.state in _AGREED
        is_elastic, advice = self._policy.sizes is not None, self._policy.advice
        # Nothing is lost before the first step: missing workers may come back, and others than those refused.
        may_come_back = (self._policy.waits or is_elastic) and not has_agreed
        if has_agreed and status.start_id != (mine.members[worker] if mine.members else mine.chief):
            return errors.WorkerError(
                f"{name} is lost: it no longer answers at step {mine.step}, and another process has come in its place. "
                f"{advice}"
            )
        start_id, why, _ = self._reached[worker]
        has_waited = self._clock() - self._began > self._policy.start_timeout_secs
        if why and start_id == status.start_id and has_waited and not has_agreed and not may_come_back:
            return errors.WorkerError(
                f"{name} has come, but is not reached from the chief: {why}. {advice}", is_final=True
            )
        is_final = worker == 0 and (status.has_mistake or status.is_final)
        if status.state is WorkerState.FAILED and (is_final or not may_come_back):
            goes_on_without = is_elastic and worker and status.exit_status not in _OF_ALL
            exit_status = errors.WorkerError.exit_status if goes_on_without else status.exit_status
            text = status.failure if worker == 0 else _with_name(name, status.failure)
            return errors.WorkerError(text, exit_status, status.is_final)
        if status.state in _ENDED and mine.waiting_secs > self._policy.worker_timeout_secs:
            return errors.WorkerError(
                f"{name} has ended after step {status.step}, but step {mine.step + 1} waits for it. Let all workers do "
                "as many steps.",
                errors.ConfigError.exit_status,
            )
        if not status.start_id or (may_come_back and self.is_silent(worker)):
            return self._failure_to_start(worker)
        if self.is_silent(worker):
            return errors.WorkerError(
                f"{name} is missing: no sign of life for {self._silent_secs(worker):.0f} s, last seen at step "
                f"{status.step}. {self._policy.advice}"
            )
        return None

    def _find_stall(self, mine: WorkerStatus) -> errors.WorkerError | None:
        """Returns the failure of live workers whose step stands still, worker_timeout_secs after they reported that."""
        # every worker's step stands still then, in an all-reduce with these: name those that wait for something else
        if mine.state is not WorkerState.TRAINING:
            return None
        rows = {i: each for i, each in enumerate(self.statuses) if not mine.members or mine.members[i]}
        late = {i: each for i, each in rows.items() if each.stalled_secs > self._policy.worker_timeout_secs}
        if {mine.stalled, *(each.stalled for each in late.values())} == {FOR_PROGRAM}:
            return None  # nobody waits for them
        by_themselves = {i: each for i, each in late.items() if each.stalled != FOR_AVERAGING}
        without_input = {i: each for i, each in by_themselves.items() if each.stalled == FOR_INPUT}
        stuck = without_input or by_themselves or (late if len(late) == len(rows) else {})
        if not stuck:
            return None
        who = "; ".join(f"{self._task.name(i)} waits for {each.stalled}" for i, each in stuck.items())
        secs = min(each.stalled_secs for each in late.values())
        return errors.WorkerError(
            f"Step {mine.step + 1} stands still, for {secs:.0f} s since that was seen: {who}. {self._policy.advice}"
        )

    def _failure_to_start(self, worker: int) -> errors.WorkerError | None:
        name, secs = self._task.name(worker), self._silent_secs(worker)
        is_over = secs > self._policy.start_timeout_secs and not self._policy.waits
        is_to_remind = self._clock() - self._last_reminder > _REMIND_SECS
        if not (is_over or is_to_remind):
            return None
        why = reason_unreached(self._task.hosts[worker], _REACH_SECS)
        # a worker that is reached may just have come; its heartbeat follows
        if is_over and (why or secs > self._policy.start_timeout_secs + self._policy.worker_timeout_secs):
            what = f"has not started, or is not reached from here ({why})," if why else "has not started"
            return errors.WorkerError(f"{name} {what} for {secs:.0f} s. {self._policy.advice}", is_final=True)
        if is_to_remind:
            self._last_reminder = self._clock()
            say(f"*** Waiting for {name}{f', which is not reached: {why}' if why else ''} ...")
        return None

    def _name_refused(self, mine: WorkerStatus) -> None:
        """Reports once why a worker outside of the group has failed, in a chief that goes on without it."""
        if self._policy.sizes is None and not self._policy.waits:
            return
        for i, status in enumerate(self.statuses):
            text = _with_name(self._task.name(i), status.failure)
            if i and i not in mine.group and status.has_mistake and text not in self._named:
                self._named.add(text)
                say(f"*** {text}")


def _with_name(name: str, failure: str) -> str:
    return failure if name in failure else f"{name}: {failure}"


def is_of_earlier_start(error: tf.errors.OpError) -> bool:
    """Returns whether an error is of a group of devices with an earlier start of a worker; only this one may notice."""
    return "incarnation" in error.message


def is_of_sizes(error: BaseException) -> bool:
    """Returns whether workers gave tensors of different sizes to one operation."""  # TensorFlow has two errors for it
    text = error.message if isinstance(error, tf.errors.OpError) else ""
    return "Shape mismatch in the collective" in text or "Tensor Size Mismatch" in text
