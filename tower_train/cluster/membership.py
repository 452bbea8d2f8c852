"""Cluster membership: start-up, agreement, heartbeats, failures, shutdown.

Training needs no leader: its collective operations wait for each other. Beside it every worker writes its status on the
chief's board, every second and more often while nothing is trained. The chief decides who is missing; the others read
that from the board, or miss the chief.
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import server, step_errors
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.single_process import SingleProcess
from tower_train.cluster.states import StateExchange
from tower_train.cluster.status_board import StatusBoard, WorkerState, WorkerStatus
from tower_train.cluster.task import Task
from tower_train.console import notice
from tower_train.graph import progress
from tower_train.graph.devices import Devices

LeaveAtOnce = Callable[[errors.WorkerError], None]

_GRACE_SECS = 5  # for the step under way to end once its session is closed
_WAITING_SECS = 0.1  # between exchanges while nothing is trained
_MOST_SHOWN = 5  # differences between workers
_COMPARISON = "number of the comparison"


class Membership(SingleProcess):
    """The membership of one worker among several. Use as a context manager around a start of a run, and as a hook.

    Args:
      task, devices: as for `join`.
      detector: decides who is missing.
      leave_at_once: as for `join`.

    Raises:
      RunError: the server cannot be started.
    """

    def __init__(self, task: Task, devices: Devices, detector: FailureDetector, leave_at_once: LeaveAtOnce):
        super().__init__(task, server.devices_among_workers(devices, task))
        self._detector, self._interval = detector, min(1.0, detector.worker_timeout_secs / 10)
        self.leave_at_once = leave_at_once
        self._lock, self._status = threading.Lock(), WorkerStatus(start_id=uuid.uuid4().hex)
        self._failure, self._session, self._comparisons = None, None, 0
        self._changed, self._ended, self._freed = threading.Event(), threading.Event(), threading.Event()
        self._server = server.start(task, self.devices.session_config)
        self.target = self._server.target
        chief = self.target if task.is_chief else f"grpc://{task.hosts[0]}"
        self._board = StatusBoard(chief, len(task.hosts), task.index, max(1.0, 2 * self._interval))
        self.states = StateExchange(chief, len(task.hosts), task.index, self._start_of, self._pause)
        self._thread = threading.Thread(target=self._watch, name="cluster", daemon=True)

    def __enter__(self):
        if self.task.is_chief:
            self._board.clear()
        self._thread.start()
        return self

    def __exit__(self, kind, error, _):
        if error is not None and not self._failure:
            text = str(error) if isinstance(error, errors.UserError) else f"{kind.__name__}: {errors.reason(error)}"
            self._tell(state=WorkerState.FAILED, failure=text, exit_status=getattr(error, "exit_status", 1),
                       is_final=getattr(error, "is_final", False))  # fmt: skip
            self._await_chiefs_start()
        if error is not None:
            time.sleep(3 * self._interval)  # for the others to read why
        self._freed.set()
        self._end_watch()

    def _await_chiefs_start(self) -> None:
        """Waits a while for a chief that has not started yet, so that it learns of this worker's failure."""
        deadline = time.monotonic() + self._detector.worker_timeout_secs
        while not self._status.chief and time.monotonic() < deadline:
            time.sleep(_WAITING_SECS)

    def after_run(self, run_context, run_values):
        self._note(step=self._status.step + 1)

    def session_opened(self, session):
        self._session = session  # closed when a worker is lost, so that a step which waits for it ends

    def note_means(self, count, waiting_secs):
        self._note(step=count, waiting_secs=waiting_secs)

    def note_stall(self, what, seconds):
        if what == progress.BETWEEN_STEPS and self.task.is_chief:
            return  # it saves and evaluates there, for as long as that takes
        self._note(stalled=what, stalled_secs=seconds)

    def agree(self, about, steps_done, last_step):
        if self.task.is_chief:
            self._tell(about=about(), steps=(steps_done, last_step), step=steps_done)
            self._tell(state=WorkerState.TRAINING, members=self._await_others())
        else:
            chief = self._await_chief(json.loads(json.dumps(about())))
            steps_done, last_step = chief.steps
            self._tell(state=WorkerState.TRAINING, step=steps_done, members=tuple(chief.members))
        return steps_done, last_step

    def compare(self, about):
        about = json.loads(json.dumps(about))
        self._comparisons += 1
        if self.task.is_chief:
            self._tell(about=about | {_COMPARISON: self._comparisons})
            return
        while (self._chief.about or {}).get(_COMPARISON) != self._comparisons:
            self._changed.set()  # to look now
            self._pause()
        try:
            self._compare(about | {_COMPARISON: self._comparisons}, self._chief.about)
        except errors.ConfigError as error:
            self.fail(error)
            raise

    def _await_others(self) -> tuple[str, ...]:
        """Waits, in the chief, until all others are ready; returns the start_ids of all workers."""
        others = range(1, len(self.task.hosts))
        while True:
            statuses = self._detector.statuses
            if all(statuses[i].state is WorkerState.READY and not self._detector.is_silent(i) for i in others):
                return self._status.start_id, *(statuses[i].start_id for i in others)
            self._pause()

    def _await_chief(self, about: dict) -> WorkerStatus:
        """Waits for a start of the chief that trains with this start of this worker; returns its status."""
        compared = None
        while self._status.start_id not in (chief := self._chief).members:
            self._note_chief(chief)
            is_of_now = chief.about is not None and chief.state is not WorkerState.OVER
            if is_of_now and chief.start_id != compared:
                compared = chief.start_id
                self._note(state=WorkerState.STARTING, chief=compared)
                self._compare(about, chief.about)
                self._tell(state=WorkerState.READY)
            self._pause()
        return chief

    def _note_chief(self, chief: WorkerStatus) -> None:
        """Takes notice of the chief, repeatedly, while this worker waits for it to begin with it."""

    def _compare(self, about: dict, chiefs: dict) -> None:
        differing = [f"{name} is {about.get(name)}, the chief's {chiefs.get(name)}"
                     for name in sorted({*chiefs, *about}) if chiefs.get(name) != about.get(name)]  # fmt: skip
        if len(differing) > _MOST_SHOWN:
            differing[_MOST_SHOWN:] = [f"and {len(differing) - _MOST_SHOWN} more"]
        if differing:
            raise errors.ConfigError(
                f"{self.task.name(self.task.index)} cannot train with the chief: {'; '.join(differing)}. Start all "
                "workers with the same code, options and data."
            )

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        try:
            yield
        except (
            RuntimeError,
            *step_errors.LOST_WORKER,
        ) as error:  # RuntimeError: the session was closed because of a failure
            if (failure := self.failure_behind(error)) is not error:
                raise failure from error
            raise

    def failure_behind(self, error):
        if step_errors.is_of_sizes(error) and not self._failure:
            self.fail(errors.ConfigError(
                f"{self.task.name(self.task.index)} and another worker give tensors of different sizes to one "
                f"operation between them ({errors.reason(error)}). Give it the same shape in all workers."
            ))  # fmt: skip
        if isinstance(error, step_errors.LOST_WORKER):
            self._explain(error)
        self._freed.set()
        return self._failure or error

    def _explain(self, error: tf.errors.OpError) -> None:
        """Waits until the failure behind an error is found. If none is, a lost connection is one itself."""
        is_stale = step_errors.is_of_earlier_start(error)
        pause_secs = self._interval / 5
        # Counts pauses, not seconds: a process that was stopped must look once more before it gives up.
        for _ in range(0 if is_stale else round(self._detector.worker_timeout_secs / pause_secs) + 25):
            if self._failure:
                return
            time.sleep(pause_secs)
        if is_stale or isinstance(error, step_errors.LOST_CONNECTION):
            self.fail(errors.WorkerError(
                f"The connection to another worker was lost at step {self._status.step} "
                f"({errors.reason(error)}). {self._detector.next_step}"
            ))  # fmt: skip

    def leave(self, stopped_by):
        self._tell(state=WorkerState.DONE, stopped_by=stopped_by)
        if self.task.is_chief:
            self._wait_for_others(WorkerState.DONE, WorkerState.GONE)
            stopped_by = self._reason_of_all(stopped_by)
            self._tell(state=WorkerState.OVER, stopped_by=stopped_by)
            self._wait_for_others(WorkerState.GONE)
            return stopped_by
        while self._chief.state is not WorkerState.OVER:
            self._pause()
        self._end_watch()
        self._tell(state=WorkerState.GONE)
        self._exchange()
        return self._chief.stopped_by

    def _reason_of_all(self, stopped_by: str | None) -> str | None:
        """Returns what ended the run, in the chief, given what ended its own steps."""
        reasons = [stopped_by, *(status.stopped_by for status in self._detector.statuses[1:])]
        return next((reason for reason in reasons if reason), None)

    def _wait_for_others(self, *states: WorkerState) -> None:
        """Returns, in the chief, when all others are in one of these states, have failed, or are missing."""
        while any(
            status.state not in states and not self._detector.is_gone(i, self._status)
            for i, status in enumerate(self._detector.statuses)
            if i and self._status.members[i]
        ):
            time.sleep(_WAITING_SECS)

    @property
    def _chief(self) -> WorkerStatus:
        return self._detector.statuses[0]

    def _start_of(self, worker: int) -> str:
        return self._status.members[worker] if self.task.is_chief else self._status.start_id

    def _note(self, **changes) -> None:
        with self._lock:
            self._status = dataclasses.replace(self._status, **changes)

    def _tell(self, **changes) -> None:
        """Changes this worker's status and tells the others at once."""
        self._note(**changes)
        self._changed.set()

    def _pause(self, seconds: float = _WAITING_SECS) -> None:
        time.sleep(seconds)
        if self._failure:
            self._freed.set()
            raise self._failure

    def _end_watch(self) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(_GRACE_SECS)

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(self._interval if self._status.state is WorkerState.TRAINING else _WAITING_SECS)
            self._changed.clear()
            try:
                self._exchange()
                self._look()
                failure = None if self._failure else self._detector.find(self._status)
            except Exception as error:  # nobody may be left waiting for a thread that has died
                failure = errors.WorkerError(
                    f"The watch over the workers has failed: {error!r}. {self._detector.next_step}"
                )
            if failure and not self._failure:
                self.fail(failure)
                self._release()

    def _look(self) -> None:
        """Called, by the watch, after each exchange."""

    def fail(self, failure: errors.UserError) -> None:
        """Tells the other workers of this one's failure, which ends it."""
        is_final = getattr(failure, "is_final", False)
        self._tell(
            state=WorkerState.FAILED, failure=str(failure), exit_status=failure.exit_status, is_final=is_final
        )  # fmt: skip
        self._failure = failure

    def _exchange(self) -> None:
        with self._lock:
            chief = self._status.chief
            if self._status.state is WorkerState.STARTING or not chief:  # none is known to one that fails at once
                chief = self._status.start_id if self.task.is_chief else self._chief.start_id
            status = dataclasses.replace(self._status, heartbeat=self._status.heartbeat + 1, chief=chief)
            self._status = status
        with contextlib.suppress(tf.errors.OpError):
            self._detector.note(self._board.exchange(status), status)

    def _release(self) -> None:
        """Frees a step that waits for a missing worker; ends the process if that does not help."""
        for _ in range(3):  # the others read from the chief who is missing, and would else miss the chief
            self._exchange()
            time.sleep(self._interval / 2)
        if self._session:
            threading.Thread(target=self._session.close, daemon=True).start()
        if not self._freed.wait(_GRACE_SECS):
            self.leave_at_once(self._failure)


def exit_at_once(error: errors.WorkerError) -> None:
    """Ends the process."""
    notice(f"error: {error}")
    os._exit(error.exit_status)


def join(
    task: Task, devices: Devices, worker_timeout_secs: float, start_timeout_secs: float, waits_for_start: bool,
    leave_at_once: LeaveAtOnce = exit_at_once, next_step: str | None = None,
) -> SingleProcess:  # fmt: skip
    """Makes this process a member of its cluster; for several workers, starts its server.

    Args:
      task: this process's.
      devices: those of a process by itself.
      worker_timeout_secs, start_timeout_secs, waits_for_start, next_step: as for FailureDetector.
      leave_at_once: ends the process if its step cannot be ended: it waits for a missing worker, or for an all-reduce.

    Raises:
      RunError: the server cannot be started.
    """
    if task.is_alone:
        return SingleProcess(task, devices, worker_timeout_secs, leave_at_once)
    detector = FailureDetector(task, worker_timeout_secs, start_timeout_secs, waits_for_start, next_step=next_step)
    return Membership(task, devices, detector, leave_at_once)
