"""Membership of a cluster for one start of a group: its server, its place, failures, shutdown.

Training needs no leader: its collective operations wait for each other. Beside it every worker writes its status on the
chief's board, every second and more often while nothing is trained. The chief decides who is missing; the others read
that from the board, or miss the chief.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import failures
from tower_train.cluster.agreement import Agreement
from tower_train.cluster.board import WorkerState, WorkerStatus
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.heartbeat import WAITING_SECS, Heartbeat
from tower_train.cluster.rendezvous import LEAVING, RESIZED, Memory, Rendezvous
from tower_train.cluster.task import Task
from tower_train.console import notice
from tower_train.graph import progress
from tower_train.graph.devices import Devices

v1 = tf.compat.v1
LeaveAtOnce = Callable[[errors.UserError], None]

_LINGER_SECS = 10  # for those that wait for a place to hear that the run is over

_servers: dict[Task, tf.distribute.Server] = {}  # TensorFlow stops none before the process ends


class Membership:
    """One worker's membership of the group that trains together; use as a context manager around a start of a run.

    A process by itself is the chief of no others.

    Args:
      task, devices, leave_at_once: as for `join`.
      detector: decides who is missing.
      rendezvous: decides who trains.

    Attributes:
      task: this process's.
      devices: of its towers; until workers agree, for the group that is expected.
      target: the server to open sessions on; empty for a process by itself.
      board: for the workers' parts of a checkpoint; None for a process by itself.

    Raises:
      RunError: the server cannot be started.
    """

    def __init__(
        self, task: Task, devices: Devices, detector: FailureDetector, rendezvous: Rendezvous,
        leave_at_once: LeaveAtOnce,
    ):  # fmt: skip
        self.task, self.devices, self.target = task, devices, ""
        self._detector, self._rendezvous, self._leave_at_once = detector, rendezvous, leave_at_once
        if not task.is_alone:
            self.devices = _as_worker(devices, task)
            self._take_place(rendezvous.expected)
            self.target = _start_server(task, self.devices.session_config).target
        chief = self.target if task.is_chief else f"grpc://{task.hosts[0]}"
        self._heartbeat = Heartbeat(task, chief, detector, rendezvous, leave_at_once)
        self.board = self._heartbeat.board
        self._agreement = Agreement(task, detector, rendezvous, self._heartbeat)

    def __enter__(self):
        if self.board:
            self._heartbeat.start()
        return self

    def __exit__(self, kind, error, _):
        if not self.board:
            return
        if error is not None and not self._heartbeat.failure:
            text = str(error) if isinstance(error, errors.UserError) else f"{kind.__name__}: {errors.reason(error)}"
            status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_status", 1)  # as of a shell
            self._heartbeat.tell_failure(text, status, getattr(error, "is_final", False))
            deadline = time.monotonic() + self._detector.worker_timeout_secs
            while not self._heartbeat.status.chief and time.monotonic() < deadline:
                time.sleep(WAITING_SECS)  # a chief that starts later learns of it too
        if error is not None:
            time.sleep(3 * self._heartbeat.interval)  # for the others to read why
        self._heartbeat.end()

    @property
    def group(self) -> tuple[int, ...]:
        """The tasks that train together; empty before they have agreed."""
        return self._heartbeat.status.group

    @property
    def is_to_resize(self) -> bool:
        """Whether the steps are to end since more workers could train along."""
        return self._heartbeat.is_to_resize

    def agree(self, about: Callable[[], Mapping], steps_done: int, last_step: int) -> tuple[int, int]:
        """Waits until all workers are ready to train the same, and returns the chief's steps_done and last_step.

        Args:
          about: returns what must be the same in all workers, by name.
          steps_done, last_step: number of earlier steps, and the last one; the chief's count.

        Raises:
          ConfigError: this worker, or another, differs from the chief.
          WorkerError: a worker is missing.
          RunOver: the run has ended without this worker.
        """
        if not self.board:
            return steps_done, last_step
        steps = self._agreement.reach(about, steps_done, last_step)
        self._take_place(self.group)
        return steps

    def compare(self, about: Mapping) -> None:
        """Makes sure that workers that have agreed mean the same; all must call it. As Agreement.compare."""
        self._agreement.compare(about)

    def session_opened(self, session: v1.Session) -> None:
        """Takes the session to close if a worker is lost, so that a step which waits for it ends."""
        self._heartbeat.session = session

    def note_step(self) -> None:
        """Takes notice of the end of a step."""
        self._heartbeat.first_step = self._heartbeat.first_step or time.monotonic()
        self._heartbeat.note(step=self._heartbeat.status.step + 1)

    def note_means(self, count: int, waiting_secs: float) -> None:
        """Takes, in another thread, the number of means over workers and the time that the next one has taken."""
        self._heartbeat.note(step=count, waiting_secs=waiting_secs)

    def note_stall(self, what: str, seconds: float) -> None:
        """Takes notice, in another thread, of a step that stands still.

        A process by itself ends if all of its towers are done and it still waits after worker_timeout_secs more: the
        all-reduce between its devices hangs, and nothing else can free it.

        Args:
          what: what it waits for; empty once it goes on.
          seconds: since that was reported.
        """
        averages = what == progress.FOR_AVERAGING and len(self.devices.towers) > 1
        if not self.board and averages and seconds > self._detector.worker_timeout_secs:
            self._leave_at_once(errors.WorkerError(
                f"The step under way waits for {what}, though all towers are done: {', '.join(self.devices.names)} "
                f"have not averaged for {seconds:.0f} s. The same command goes on from the last checkpoint; if that "
                "happens again, try --all_reduce=collective or --variable_update=cpu."
            ))  # fmt: skip
        if what != progress.BETWEEN_STEPS or not self.task.is_chief:  # which saves and evaluates there
            self._heartbeat.note(stalled=what, stalled_secs=seconds)

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        """Converts TensorFlow's error into a WorkerError that names the missing worker."""
        try:
            yield
        except (RuntimeError, *failures.LOST_WORKER) as error:  # RuntimeError: the session was closed for a failure
            if (failure := self.failure_behind(error)) is not error:
                raise failure from error
            raise

    def failure_behind(self, error: BaseException) -> BaseException:
        """Returns the WorkerError behind a step's error, after waiting for a worker to be named, or the error
        itself."""
        if not self.board:
            return error
        if failures.is_of_sizes(error) and not self._heartbeat.failure:
            self._heartbeat.fail(errors.ConfigError(
                f"{self.task.name(self.task.index)} and another worker give tensors of different sizes to one "
                f"operation between them ({errors.reason(error)}). Give it the same shape in all workers."
            ))  # fmt: skip
        if isinstance(error, failures.LOST_WORKER):
            self._heartbeat.explain(error)
        return self._heartbeat.note_failure() or error

    def leave(self, stopped_by: str | None) -> str | None:
        """Waits until all have ended, so that nobody misses what another still has to send.

        Args:
          stopped_by: what ended this worker's steps; None if another worker knows.

        Returns:
          What ended the run, the same in all workers; in one that was told to leave an elastic cluster, that.

        Raises:
          WorkerError: the chief is missing, which had yet to save.
        """
        self._heartbeat.tell(state=WorkerState.DONE, stopped_by=stopped_by)
        if self.task.is_chief:
            self._wait_for_others(WorkerState.DONE, WorkerState.GONE)
            others = {i: self._detector.statuses[i].stopped_by for i in self.group if i}
            of_all = self._rendezvous.reason_of_all(stopped_by, others)
            next_group = self._heartbeat.next_start().group
            self._heartbeat.tell(state=WorkerState.OVER, stopped_by=of_all, next_group=next_group)
            self._wait_for_others(WorkerState.GONE)
            deadline = time.monotonic() + _LINGER_SECS
            while of_all != RESIZED and self._ready() and time.monotonic() < deadline:
                self._heartbeat.pause()  # for workers without a place to learn that the run is over
            return of_all
        while self._chief.state is not WorkerState.OVER:
            self._heartbeat.pause()
        self._heartbeat.end(WorkerState.GONE)
        of_all = self._chief.stopped_by
        return stopped_by if of_all == RESIZED and stopped_by in LEAVING else of_all

    def resized(self) -> errors.WorkerError:
        """Returns the error with which a cluster restarts itself once it has left because of RESIZED."""
        leaving, waiting = sorted(self._rendezvous.leaving), self._ready() if self.task.is_chief else []
        names = ", ".join(map(self.task.name, leaving or waiting))
        what = "was told to end" if leaving else "waits for a place"
        why = f"{names} {what}" if names else "the chief goes on with other workers"
        text = f"Saved at step {self._heartbeat.status.step}, as {why}. {failures.RESIZES}"
        return errors.WorkerError(text, environment=self._heartbeat.next_start().environment())

    @property
    def _chief(self) -> WorkerStatus:
        return self._detector.statuses[0]

    def _ready(self) -> list[int]:
        return self._detector.ready(self._heartbeat.status)

    def _take_place(self, group) -> None:
        """Makes `devices` those of this task's place in a group of tasks."""
        place = {"num_workers": len(group), "worker": group.index(self.task.index)}
        if any(getattr(self.devices, name) != value for name, value in place.items()):
            self.devices = dataclasses.replace(self.devices, **place)

    def _wait_for_others(self, *states: WorkerState) -> None:
        """Returns, in the chief, when all others are in one of these states, have failed, or are missing."""
        while any(
            self._detector.statuses[i].state not in states and not self._detector.is_gone(i, self._heartbeat.status)
            for i in self.group if i
        ):  # fmt: skip
            time.sleep(WAITING_SECS)


def exit_at_once(error: errors.UserError) -> None:
    """Ends the process."""
    notice(f"error: {error}")
    os._exit(error.exit_status)


def join(
    task: Task, devices: Devices, worker_timeout_secs: float, start_timeout_secs: float, waits_for_start: bool = False,
    leave_at_once: LeaveAtOnce = exit_at_once, next_step: str | None = None,
) -> Membership:  # fmt: skip
    """Makes this process a member of its cluster; for several workers, starts its server.

    Args:
      task: this process's.
      devices: those of a process by itself.
      worker_timeout_secs, start_timeout_secs, waits_for_start, next_step: as for FailureDetector.
      leave_at_once: ends the process if its step cannot be ended: it waits for a missing worker, or for an all-reduce.

    Raises:
      RunError: the server cannot be started.
    """
    detector = FailureDetector(task, worker_timeout_secs, start_timeout_secs, waits_for_start, next_step=next_step)
    rendezvous = Rendezvous(task, None, Memory(), worker_timeout_secs, start_timeout_secs)
    return Membership(task, devices, detector, rendezvous, leave_at_once)


def join_elastic(
    task: Task, devices: Devices, worker_timeout_secs: float, start_timeout_secs: float, sizes: tuple[int, int],
    leave_at_once: LeaveAtOnce = exit_at_once,
) -> Membership:  # fmt: skip
    """Makes this process a member of an elastic cluster, which goes on without lost workers and takes in later ones.

    Args:
      sizes: least and most workers.
      task, devices, worker_timeout_secs, start_timeout_secs, leave_at_once: as for `join`.

    Raises:
      RunError: the server cannot be started.
    """
    timeouts = worker_timeout_secs, start_timeout_secs
    detector = FailureDetector(task, *timeouts, False, is_elastic=True)
    return Membership(
        task, devices, detector, Rendezvous(task, sizes, Memory.of_environment(), *timeouts), leave_at_once
    )


def _start_server(task: Task, config: v1.ConfigProto) -> tf.distribute.Server:
    """Starts the server of a task, or returns an earlier training's in this process; RunError if it cannot."""
    try:
        if task not in _servers:
            _servers[task] = tf.distribute.Server({"worker": list(task.hosts)}, "worker", task.index, config=config)
        return _servers[task]
    except tf.errors.OpError as error:
        raise errors.RunError(
            f"{task.name(task.index)} cannot be started: its port is in use, or cannot be had ({error.message}). "
            "Stop what uses it, or give another port (--worker_hosts, TF_CONFIG)."
        ) from None


def _as_worker(devices: Devices, task: Task) -> Devices:
    """Returns the devices of a process by itself as those of one worker among several."""
    config = v1.ConfigProto()
    config.CopyFrom(devices.session_config)
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    # A session sees this worker's devices only, so that it need not wait for the others.
    config.device_filters.append(f"/job:worker/task:{task.index}")
    return dataclasses.replace(devices, session_config=config)
