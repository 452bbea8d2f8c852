"""Cluster membership of a process that trains by itself."""

import contextlib
import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.states import StateExchange
from tower_train.cluster.task import Task
from tower_train.graph import progress
from tower_train.graph.devices import Devices

v1 = tf.compat.v1

RESIZED = "another number of workers"  # what ends the steps of an elastic cluster that goes on in another size


class RunOver(Exception):
    """A run that has ended while this worker waited for a place in it.

    Attributes:
      stopped_by: what ended it.
      step: its last.
    """

    def __init__(self, stopped_by: str, step: int):
        super().__init__(stopped_by, step)
        self.stopped_by, self.step = stopped_by, step


class SingleProcess(v1.train.SessionRunHook):
    """The membership of a process that trains by itself: the chief of no others.

    Attributes:
      task: this process's.
      devices: of its towers.
      target: the server to open sessions on.
      is_to_resize: whether the steps are to end since more workers could train along.
      leave_at_once: ends the process if TensorFlow does not return, with an error as the reason.
      states: the exchange of the workers' states; None for a process by itself.
    """

    target = ""
    is_to_resize = False
    states: StateExchange | None = None

    def __init__(
        self, task: Task, devices: Devices, worker_timeout_secs: float = math.inf,
        leave_at_once: Callable[[errors.WorkerError], None] = lambda error: None,
    ):  # fmt: skip
        """Takes the arguments of membership.join."""
        self.task, self.devices = task, devices
        self._worker_timeout_secs, self.leave_at_once = worker_timeout_secs, leave_at_once

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def session_opened(self, session: v1.Session) -> None:
        """Called with the session as soon as it is open."""

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
        return steps_done, last_step

    def compare(self, about: Mapping) -> None:
        """Makes sure that workers that have agreed mean the same; all must call it.

        Args:
          about: what must be the same, by name.

        Raises:
          ConfigError: this worker differs from the chief, which ends all.
          WorkerError: a worker is missing.
        """

    def note_means(self, count: int, waiting_secs: float) -> None:
        """Takes, in another thread, the number of means over workers and the time that the next one has taken."""

    def note_stall(self, what: str, seconds: float) -> None:
        """Takes notice, in another thread, of a step that stands still.

        A process by itself ends if all of its towers are done and it still waits after worker_timeout_secs more: the
        all-reduce between its devices hangs, and nothing else can free it.

        Args:
          what: what it waits for; empty once it goes on.
          seconds: since that was reported.
        """
        averages = what == progress.FOR_AVERAGING and len(self.devices.towers) > 1
        if averages and seconds > self._worker_timeout_secs:
            self.leave_at_once(errors.WorkerError(
                f"The step under way waits for {what}, though all towers are done: {', '.join(self.devices.names)} "
                f"have not averaged for {seconds:.0f} s. The same command goes on from the last checkpoint; if that "
                "happens again, try --all_reduce=collective or --variable_update=cpu."
            ))  # fmt: skip

    def failures_named(self) -> contextlib.AbstractContextManager[None]:
        """Converts TensorFlow's error into a WorkerError that names the missing worker."""
        return contextlib.nullcontext()

    def failure_behind(self, error: BaseException) -> BaseException:
        """Returns the WorkerError behind a step's error, after waiting for a worker to be named, or the error
        itself."""
        return error

    def leave(self, stopped_by: str | None) -> str | None:
        """Waits until all have ended, so that nobody misses what another still has to send.

        Args:
          stopped_by: what ended this worker's steps; None if another worker knows.

        Returns:
          What ended the run, the same in all workers.

        Raises:
          WorkerError: the chief is missing, which had yet to save.
        """
        return stopped_by

    def resized(self) -> errors.WorkerError:
        """Returns the error with which a cluster restarts itself once it has left because of RESIZED."""
        raise NotImplementedError

    def remember(self, failure: errors.WorkerError) -> None:
        """Gives an error that ends this start the memory for the next one."""
