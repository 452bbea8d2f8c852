"""Membership of a cluster for one start of a group: its server, its place, failures, shutdown.

Training needs no leader: its collective operations wait for each other. Besides that, every worker writes its status
to the chief's key-value store, at least once a second. The chief decides who is missing; the others read that there, or
notice that the chief does not answer.
"""

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import failures
from tower_train.cluster.agreement import Agreement
from tower_train.cluster.heartbeat import WAITING_SECS, Heartbeat
from tower_train.cluster.rendezvous import LEAVING, RESIZED
from tower_train.cluster.store import Store, WorkerState, place, reason_unreached
from tower_train.cluster.task import RESIZES, Policy, Task
from tower_train.console import say
from tower_train.graph.devices import Devices

v1 = tf.compat.v1
LeaveAtOnce = Callable[[errors.UserError], None]

_RETURN_SECS = 60  # in which a lost worker starts itself again, also on a busy machine

_servers: dict[Task, tf.distribute.Server] = {}  # TensorFlow stops none before the process ends


class Membership:
    """A process's membership of the group that trains together, for one start; a context manager around that.

    This one is that of a process by itself. Arguments as for `join`.
    """

    target: str = ""  # the server to open sessions on
    store: Store | None = None  # for the workers' parts of a checkpoint
    is_to_resize: bool = False  # the steps are to end since more workers could train along

    def __init__(self, task: Task, devices: Devices, policy: Policy, leave_at_once: LeaveAtOnce):
        self.task, self._policy, self._leave_at_once = task, policy, leave_at_once
        self.devices = devices  # of its towers; until workers agree, for the group that is expected

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Leaves; the others learn of the error."""

    def agree(self, facts: Callable[[], Mapping], steps_done: int, last_step: int) -> tuple[int, int]:
        """Waits until all workers are ready to train the same, and returns the chief's steps_done and last_step.

        facts: returns what must be the same in all workers, by name. Raises ConfigError if a worker differs from the
        chief, WorkerError if one is missing, RunOver if the run has ended without this one.
        """
        return steps_done, last_step

    def session_opened(self, session: v1.Session) -> None:
        """Takes the session to close if a worker is lost, so that a step which waits for it ends; WorkerError if one is
        lost already."""

    def note_step(self) -> None:
        """Notes the end of a step."""

    def note_stall(self, what: str, seconds: float) -> None:
        """Notes, in another thread, that a step has stood still for some seconds since that was reported, and what it
        waits for; empty once it goes on."""
        # all towers are done: the all-reduce between this process's devices hangs, and nothing else can free it
        averages = what == failures.FOR_AVERAGING and len(self.devices.towers) > 1
        if averages and seconds > self._policy.worker_timeout_secs:
            late = f"{', '.join(self.devices.names)} have not averaged for {seconds:.0f} s"
            error = errors.WorkerError(
                f"The step under way waits for {what}, though all towers are done: {late}. The same command goes on "
                "from the last checkpoint; if that happens again, try --all_reduce=collective or --variable_update=cpu."
            )
            self._leave_at_once(error)

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
        """Returns the WorkerError behind a step's error, once a worker is named, or the error itself."""
        return error

    def leave(self, stopped_by: str | None) -> str | None:
        """Waits until all have ended, so that nobody misses what another still has to send. stopped_by: what ended this
        worker's steps; None if another worker knows. WorkerError if the chief is missing, which had yet to save.

        Returns:
          What ended the run, the same in all workers; in one that was told to leave an elastic cluster, that.
        """
        return stopped_by


class WorkerMembership(Membership):
    """One of several workers' membership, with its server and its heartbeat; RunError if that cannot be started."""

    def __init__(self, task: Task, devices: Devices, policy: Policy, leave_at_once: LeaveAtOnce):
        config = v1.ConfigProto()
        config.CopyFrom(devices.session_config)
        config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        # A session sees this worker's devices only, so that it need not wait for the others.
        config.device_filters.append(f"/job:worker/task:{task.index}")
        super().__init__(task, dataclasses.replace(devices, session_config=config), policy, leave_at_once)
        self.target = _start_server(task, self.devices.session_config).target
        chief = self.target if task.is_chief else f"grpc://{task.hosts[0]}"
        self._heartbeat = Heartbeat(task, policy, chief, leave_at_once)
        self._detector, self._rendezvous = self._heartbeat.detector, self._heartbeat.rendezvous
        self._take_place(self._rendezvous.expected)
        self._check_address()
        self.store, self.agreement = self._heartbeat.store, Agreement(task, self._heartbeat)

    def __enter__(self):
        self._heartbeat.start()
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            self._heartbeat.leave_for(error)
        self._heartbeat.end()

    @property
    def is_to_resize(self):
        return self._heartbeat.is_to_resize

    def agree(self, facts, steps_done, last_step):
        steps = self.agreement.reach(facts, steps_done, last_step)
        self._take_place(self._heartbeat.status.group)
        return steps

    def session_opened(self, session):
        self._heartbeat.session = session
        if self._heartbeat.failure:  # nobody would close it
            raise self._heartbeat.note_failure()

    def note_step(self):
        self._heartbeat.first_step = self._heartbeat.first_step or time.monotonic()
        self._heartbeat.note(step=self._heartbeat.status.step + 1)

    def note_means(self, count: int, waiting_secs: float) -> None:
        """Notes, in another thread, the number of means over workers and how long the next one has been awaited."""
        self._heartbeat.note(step=count, waiting_secs=waiting_secs)

    def note_stall(self, what, seconds):
        if what != failures.BETWEEN_STEPS or not self.task.is_chief:  # which saves and evaluates there
            self._heartbeat.note(stalled=what, stalled_secs=seconds)

    def failure_behind(self, error):
        if failures.is_of_sizes(error) and not self._heartbeat.failure:
            self._heartbeat.fail(
                errors.ConfigError(
                    f"{self.task.name(self.task.index)} and another worker give tensors of different sizes to one "
                    f"operation between them ({errors.reason(error)}). Give it the same shape in all workers."
                )
            )
        if isinstance(error, failures.LOST_WORKER):
            self._heartbeat.explain(error)
        return self._heartbeat.note_failure() or error

    def leave(self, stopped_by):
        self._heartbeat.tell(state=WorkerState.DONE, stopped_by=stopped_by)
        if self.task.is_chief:
            return self._leave_last(stopped_by)
        while (chief := self._detector.statuses[0]).state is not WorkerState.OVER:
            self._heartbeat.pause()
        self._heartbeat.end(WorkerState.GONE)
        return stopped_by if chief.stopped_by == RESIZED and stopped_by in LEAVING else chief.stopped_by

    def _leave_last(self, stopped_by: str | None) -> str | None:
        """Leaves, as the chief, after all others: the store is on its server."""
        self._wait_for_others(WorkerState.DONE, WorkerState.GONE)
        others = {i: self._detector.statuses[i].stopped_by for i in self._heartbeat.status.group if i}
        agreed = self._rendezvous.agreed_reason(stopped_by, others)
        next_group = self._heartbeat.next_start().group
        self._heartbeat.tell(state=WorkerState.OVER, stopped_by=agreed, next_group=next_group)
        self._wait_for_others(WorkerState.GONE)
        if agreed != RESIZED:
            # workers that were told to end stay away; None: a lost worker has ended the run
            self._tell_latecomers(may_return=agreed not in (*LEAVING, None))
        return agreed

    def _tell_latecomers(self, may_return: bool) -> None:
        """Stays, as the chief of a run that is over, until workers outside of it know; and for a while for lost ones
        that start themselves again, which would wait for it for ever."""
        now = time.monotonic()
        if lost := self._lost() if may_return else []:
            names = ", ".join(map(self.task.name, lost))
            say(f"*** Staying for at most {_RETURN_SECS} s, to tell {names} that the run has ended.")
        while (
            self._detector.newcomers()
            and time.monotonic() < now + self._policy.start_timeout_secs
            or (set(lost) & set(self._lost()) and time.monotonic() < now + _RETURN_SECS)
        ):
            self._heartbeat.pause()

    def _lost(self) -> list[int]:
        """Returns the tasks of this run, also of earlier starts, that have neither left nor made a mistake."""
        trained = {*self._heartbeat.status.group, *self._rendezvous.memory.lost} - {0}
        statuses = self._detector.statuses
        return [i for i in sorted(trained) if not (statuses[i].state is WorkerState.GONE or statuses[i].has_mistake)]

    def resized(self) -> errors.WorkerError:
        """Returns the error by which a worker restarts itself after it has left because of RESIZED."""
        text = f"Saved at step {self._heartbeat.status.step}, to go on with other workers. {RESIZES}"
        return errors.WorkerError(text, environment=self._heartbeat.next_start().environment())

    def _check_address(self) -> None:
        """Raises ConfigError if this worker's address leads to another process or machine; reports it if to none."""
        index, start_id = self.task.index, self._heartbeat.status.start_id
        host, timeout_ms = self.task.hosts[index], round(1000 * min(2.0, self._policy.worker_timeout_secs))
        config = v1.ConfigProto(device_filters=[f"/job:worker/task:{index}"], operation_timeout_in_ms=timeout_ms)
        with tf.Graph().as_default(), tf.device(f"/job:worker/task:{index}/cpu:0"):
            write, read = place("start", start_id)
            with v1.Session(self.target, config=config) as session:
                session.run(write)
            try:
                # The 0 is for TensorFlow, which takes this process's own address, as it is written, for this process.
                name, _, port = host.rpartition(":")
                with v1.Session(f"grpc://{name}:0{port}", config=config) as session:
                    found = session.run(read).decode()
            except tf.errors.OpError:
                why = reason_unreached(host, timeout_ms / 1000) or "what answers there is no worker"
                text = f"{self.task.name(index)} is not reached at its address, not even from here: {why}."
                if why == os.strerror(errno.ECONNREFUSED):  # of another machine: a name may become known, a path open
                    raise errors.ConfigError(f"{text} Start it on that machine, or give its own address.") from None
                say(f"*** {text}")
                return
        if found != start_id:
            raise errors.ConfigError(
                f"{self.task.name(index)} is another process, which answers at that address. Stop that first, or give "
                "this one another --task_index."
            )

    def _take_place(self, group) -> None:
        """Makes `devices` those of this task's place in a group of tasks."""
        worker = group.index(self.task.index)
        self.devices = dataclasses.replace(self.devices, num_workers=len(group), worker=worker)

    def _wait_for_others(self, *states: WorkerState) -> None:
        """Returns, in the chief, when all others are in one of these states, have failed, or are missing."""
        while any(
            self._detector.statuses[i].state not in states and not self._detector.is_gone(i, self._heartbeat.status)
            for i in self._heartbeat.status.group
            if i
        ):
            time.sleep(WAITING_SECS)


def join(task: Task, devices: Devices, policy: Policy, leave_at_once: LeaveAtOnce) -> Membership:
    """Makes this process a member of its cluster; for several workers, starts its server (RunError if that fails).

    devices: those of a process by itself; leave_at_once: called if a step cannot be ended, as it waits for a missing
    worker or for an all-reduce.
    """
    return (Membership if task.is_alone else WorkerMembership)(task, devices, policy, leave_at_once)


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
