"""The heartbeat of a worker: a thread that tells the others its status, learns theirs, and acts if one is missing."""

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import failures
from tower_train.cluster.board import Board, WorkerState, WorkerStatus
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.rendezvous import Memory, Rendezvous
from tower_train.cluster.task import Task

WAITING_SECS = 0.1  # between heartbeats while nothing is trained
_GRACE_SECS = 5  # for the step under way to end once its session is closed


class Heartbeat:
    """A worker's status, and the failure that ends it. A process by itself has a status that it tells nobody.

    Args:
      task: this process's.
      target: the chief's server.
      detector: decides who is missing.
      rendezvous: decides who trains.
      leave_at_once: ends the process if its step cannot be ended.

    Attributes:
      status: this worker's, the same at the next heartbeat for all.
      failure: ends this worker; None while all is well.
      session: closed when a worker is lost, so that a step which waits for it ends.
      first_step: the time at which this start's first step ended; None before that.
      is_to_resize: whether the steps are to end since more workers could train along.
      interval: seconds between heartbeats during training.
      board: None for a process by itself.
    """

    def __init__(
        self, task: Task, target: str, detector: FailureDetector, rendezvous: Rendezvous,
        leave_at_once: Callable[[errors.UserError], None],
    ):  # fmt: skip
        self._task, self._detector, self._rendezvous, self._leave_at_once = task, detector, rendezvous, leave_at_once
        self.status, self.failure, self.session = WorkerStatus(start_id=uuid.uuid4().hex), None, None
        self.first_step, self.is_to_resize, self.interval = None, False, min(1.0, detector.worker_timeout_secs / 10)
        self._changed, self._ended, self._freed = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        timeout_secs = max(1.0, 2 * self.interval)
        self.board = None if task.is_alone else Board(target, task, timeout_secs, self._start_of, self.pause)

    def start(self) -> None:
        if self._task.is_chief:
            self.board.clear()
        self._thread.start()

    def end(self, last_state: WorkerState | None = None) -> None:
        """Ends the thread, and leaves a last state on the board."""
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

    def tell_failure(self, text: str, exit_status: int, is_final: bool, **changes) -> None:
        self.tell(state=WorkerState.FAILED, failure=text, exit_status=exit_status, is_final=is_final, **changes)

    def fail(self, failure: errors.UserError) -> None:
        """Ends this worker for a failure, of which it tells the others."""
        memory, is_final = self.next_start(), getattr(failure, "is_final", False)
        self.tell_failure(str(failure), failure.exit_status, is_final, next_group=memory.group)
        if self._rendezvous.is_elastic and isinstance(failure, errors.WorkerError):
            failure = errors.WorkerError(str(failure), failure.exit_status, is_final, memory.environment())
        self.failure = failure

    def pause(self, seconds: float = WAITING_SECS) -> None:
        """Waits; raises the failure if there is one."""
        time.sleep(seconds)
        if self.failure:
            raise self.note_failure()

    def note_failure(self) -> errors.UserError | None:
        """Returns the failure to this worker's main thread, which ends by itself then."""
        self._freed.set()
        return self.failure

    def explain(self, error: tf.errors.OpError) -> None:
        """Waits until the failure behind an error is found. If none is, a lost connection is one itself."""
        is_stale, pause_secs = failures.is_of_earlier_start(error), self.interval / 5
        # Counts pauses, not seconds: a process that was stopped must look once more before it gives up.
        for _ in range(0 if is_stale else round(self._detector.worker_timeout_secs / pause_secs) + 25):
            if self.failure:
                return
            time.sleep(pause_secs)
        if is_stale or isinstance(error, failures.LOST_CONNECTION):
            self.fail(errors.WorkerError(
                f"The connection to another worker was lost at step {self.status.step} "
                f"({errors.reason(error)}). {self._detector.next_step}"
            ))  # fmt: skip

    def next_start(self) -> Memory:
        """Returns what this process will have to know at its next start."""
        memory, group, has_stepped = self._rendezvous.memory, self.status.group, self.first_step is not None
        if not self._task.is_chief:
            return memory.after(has_stepped, group, (), self._detector.statuses[0].next_group or group)
        others = {i: self._detector.statuses[i] for i in group if i}
        away = {i for i, other in others.items() if other.has_mistake or self._detector.is_silent(i)}
        away |= self._rendezvous.leaving
        restarted = {i for i, other in others.items() if other.start_id != self.status.members[i]}
        return memory.after(has_stepped, group, away | restarted, {*group, *self._detector.ready(self.status)} - away)

    def _start_of(self, worker: int) -> str:
        return self.status.members[worker] if self._task.is_chief else self.status.start_id

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(self.interval if self.status.state is WorkerState.TRAINING else WAITING_SECS)
            self._changed.clear()
            try:
                self._exchange()
                if self._task.is_chief and self.status.state is WorkerState.TRAINING and not self.is_to_resize:
                    secs = self.first_step and time.monotonic() - self.first_step
                    ready = self._detector.ready(self.status)
                    self.is_to_resize = self._rendezvous.is_to_grow(self.status.group, ready, secs)
                failure = None if self.failure else self._detector.find(self.status)
            except Exception as error:  # nobody may be left waiting for a thread that has died
                text = f"The watch over the workers has failed: {error!r}. {self._detector.next_step}"
                failure = errors.WorkerError(text)
            if failure and not self.failure:
                self.fail(failure)
                self._release()

    def _exchange(self) -> None:
        with self._lock:
            chief = self.status.chief
            if self.status.state is WorkerState.STARTING or not chief:  # none is known to one that fails at once
                chief = self.status.start_id if self._task.is_chief else self._detector.statuses[0].start_id
            self.status = dataclasses.replace(self.status, heartbeat=self.status.heartbeat + 1, chief=chief)
            status = self.status
        with contextlib.suppress(tf.errors.OpError):
            self._detector.note(self.board.exchange(status), status)

    def _release(self) -> None:
        """Frees a step that waits for a missing worker; ends the process if that does not help."""
        for _ in range(3):  # the others read from the chief who is missing, and would else miss the chief
            self._exchange()
            time.sleep(self.interval / 2)
        if self.session:
            threading.Thread(target=self.session.close, daemon=True).start()
        if not self._freed.wait(_GRACE_SECS):
            self._leave_at_once(self.failure)
