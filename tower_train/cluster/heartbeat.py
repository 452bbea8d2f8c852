"""The heartbeat of a worker: a thread that exchanges statuses with the others, and acts if one is missing."""

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import failures
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.rendezvous import Memory, Rendezvous
from tower_train.cluster.store import Store, WorkerState, WorkerStatus
from tower_train.cluster.task import Policy, Task

WAITING_SECS = 0.1  # between heartbeats while nothing is trained
_GRACE_SECS = 5  # for the step under way to end once its session is closed
_SILENT_BEATS = 4  # after which the process of a row is dead
_LEFT = (WorkerState.OVER, WorkerState.GONE, WorkerState.FAILED)


class Heartbeat:
    """A worker's status in the store, and the failure that ends it. target: the chief's server; leave_at_once: ends the
    process if its step cannot be ended."""

    def __init__(self, task: Task, policy: Policy, target: str, leave_at_once: Callable[[errors.UserError], None]):
        self._task, self._policy, self._leave_at_once = task, policy, leave_at_once
        self.detector = FailureDetector(task, policy)
        self.rendezvous = Rendezvous(task, policy, Memory.from_environment() if policy.sizes else None)
        self.status = WorkerStatus(start_id=uuid.uuid4().hex)
        self.failure = None  # ends this worker
        self.session = None  # closed when a worker is lost, so that a step which waits for it ends
        self.first_step = None  # the time at which this start's first step ended
        self.is_to_resize = False  # the steps are to end since more workers could train along
        self.is_displaced = False  # another process has this one's place
        self._interval = min(1.0, policy.worker_timeout_secs / 10)  # between heartbeats, during training
        # whether this worker writes its row: the chief always, another once no other process has its place
        self.has_row, self._seen, self._seen_at = task.is_chief, None, 0.0
        self._changed, self._ended, self._freed = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.store = Store(target, task, max(1.0, 2 * self._interval), self._start_id, self.pause)

    def start(self) -> None:
        if self._task.is_chief:
            self.store.clear()
        self._thread.start()

    def end(self, last_state: WorkerState | None = None) -> None:
        """Ends the thread, and leaves a last state in the store."""
        self._freed.set()
        self._ended.set()
        self._changed.set()
        self._thread.join(_GRACE_SECS)
        if last_state:
            self.note(state=last_state)
            self._exchange()

    def note(self, **changes) -> None:
        """Changes this worker's status, for the next heartbeat."""
        with self._lock:
            self.status = dataclasses.replace(self.status, **changes)

    def tell(self, **changes) -> None:
        """Changes this worker's status and tells the others at once."""
        self.note(**changes)
        self._changed.set()

    def fail(self, failure: errors.UserError) -> None:
        """Ends this worker because of a failure, and tells the others."""
        memory = self.next_start()
        self._tell_failure(failure, next_group=memory.group)
        if self.rendezvous.is_elastic and isinstance(failure, errors.WorkerError):
            failure = errors.WorkerError(str(failure), failure.exit_status, failure.is_final, memory.environment())
        self.failure = failure

    def leave_for(self, error: BaseException) -> None:
        """Tells the others, also a chief that starts later, of the error that ends this worker."""
        if not self.failure:
            self._tell_failure(error)
            deadline = time.monotonic() + self._policy.worker_timeout_secs
            while not (self.has_row and self.status.chief or self.is_displaced) and time.monotonic() < deadline:
                time.sleep(WAITING_SECS)
        time.sleep(3 * self._interval)  # for the others to read why

    def _tell_failure(self, error: BaseException, **changes) -> None:
        is_named, is_final = isinstance(error, errors.UserError), getattr(error, "is_final", False)
        text = " ".join(str(error).splitlines()) if is_named else f"{type(error).__name__}: {errors.reason(error)}"
        status = getattr(error, "exit_status", 1)
        if isinstance(error, KeyboardInterrupt):
            text, status = f"{self._task.name(self._task.index)} was interrupted", 130  # as of a shell
        self.tell(state=WorkerState.FAILED, failure=text, exit_status=status, is_final=is_final, **changes)

    def pause(self, seconds: float = WAITING_SECS) -> None:
        """Waits; raises the failure if there is one."""
        time.sleep(seconds)
        if self.failure:
            raise self.note_failure()

    def note_failure(self) -> errors.UserError | None:
        """Returns the failure to this worker's main thread, which then ends by itself."""
        self._freed.set()
        return self.failure

    def explain(self, error: tf.errors.OpError) -> None:
        """Waits until the failure behind an error is found. If none is, a lost connection is one itself."""
        is_stale, pause_secs = failures.is_of_earlier_start(error), self._interval / 5
        # Counts pauses, not seconds: a process that was stopped must look once more before it gives up.
        for _ in range(0 if is_stale else round(self._policy.worker_timeout_secs / pause_secs) + 25):
            if self.failure:
                return
            time.sleep(pause_secs)
        if is_stale or isinstance(error, failures.LOST_CONNECTION):
            lost = f"The connection to another worker was lost at step {self.status.step} ({errors.reason(error)})."
            self.fail(errors.WorkerError(f"{lost} {self._policy.advice}"))

    def next_start(self) -> Memory:
        """Returns what this process must know at its next start."""
        statuses, group = self.detector.statuses, self.status.group
        idle_starts = 0 if self.first_step else self.rendezvous.memory.idle_starts + 1
        if not self._task.is_chief:
            return Memory(tuple(statuses[0].next_group or group), idle_starts)
        away = {i for i in group if i and (statuses[i].has_mistake or self.detector.is_silent(i))}
        there = {*group, *self.detector.ready(self.status)} - away - self.rendezvous.leaving
        lost = {*self.rendezvous.memory.lost, *group} - there - self.rendezvous.leaving
        return Memory(tuple(sorted(there)), idle_starts, tuple(sorted(lost)))

    def _start_id(self, worker: int) -> str:
        return self.status.members[worker] if self._task.is_chief else self.status.start_id

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(self._interval if self.status.state is WorkerState.TRAINING else WAITING_SECS)
            self._changed.clear()
            try:
                self._exchange()
                if self._task.is_chief and self.status.state is WorkerState.TRAINING and not self.is_to_resize:
                    secs = self.first_step and time.monotonic() - self.first_step
                    ready = self.detector.ready(self.status)
                    self.is_to_resize = self.rendezvous.is_to_grow(self.status.group, ready, secs)
                failure = None if self.failure else self.detector.find(self.status)
            except Exception as error:  # nobody may be left waiting for a thread that has died
                failure = errors.WorkerError(f"The watch over the workers has failed: {error!r}. {self._policy.advice}")
            if failure and not self.failure:
                self.fail(failure)
                self._release()

    def _exchange(self) -> None:
        with contextlib.suppress(tf.errors.OpError):
            if not (self.has_row or self._take_row()):
                return
            with self._lock:
                chief = self.status.chief
                if self.status.state is WorkerState.STARTING or not chief:  # who fails at once knows none yet
                    chief = self.status.start_id if self._task.is_chief else self.detector.statuses[0].start_id
                self.status = dataclasses.replace(self.status, heartbeat=self.status.heartbeat + 1, chief=chief)
                status = self.status
            rows = self.store.exchange(status)
            self.detector.note(rows if self._task.is_chief else rows[:1], status)

    def _take_row(self) -> bool:
        """Reads the store, and returns whether this worker may write its row: no other process has its place."""
        chief, before = self.store.exchange(None)
        self.detector.note([chief], self.status)
        seen, self._seen, now = self._seen, (before.start_id, before.heartbeat), time.monotonic()
        if seen != self._seen:
            self.is_displaced = bool(seen and seen[0] == before.start_id)
            self._seen_at = now
        is_silent = now - self._seen_at > _SILENT_BEATS * self._interval
        self.has_row = not before.start_id or before.state in _LEFT or is_silent
        return self.has_row

    def _release(self) -> None:
        """Frees a step that waits for a missing worker; ends the process if that does not help."""
        for _ in range(3):  # the others learn from the chief who is missing
            self._exchange()
            time.sleep(self._interval / 2)
        if self.session:
            threading.Thread(target=self.session.close, daemon=True).start()
        if not self._freed.wait(_GRACE_SECS):
            self._leave_at_once(self.failure)
