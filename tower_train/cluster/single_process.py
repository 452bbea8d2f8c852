"""Cluster membership of a process that trains by itself."""

import contextlib
from collections.abc import Callable, Mapping

import tensorflow as tf

from tower_train.cluster.task import Task
from tower_train.graph.devices import Devices

v1 = tf.compat.v1


class SingleProcess(v1.train.SessionRunHook):
    """The membership of a process that trains by itself: the chief of no others.

    Attributes:
      task: this process's.
      devices: where its towers live.
      target: the server to open sessions on.
    """

    target = ""

    def __init__(self, task: Task, devices: Devices):
        self.task, self.devices = task, devices

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def session_opened(self, session: v1.Session) -> None:
        """Called with the session as soon as it is open."""

    def agree(self, about: Callable[[], Mapping], steps_done: int, last_step: int) -> tuple[int, int]:
        """Waits until all workers are ready to train the same, and returns the chief's steps_done and last_step.

        Args:
          about: gives what must be the same in all workers, by name.
          steps_done, last_step: how many were done before, and the last; of the workers' the chief's count.

        Raises:
          ConfigError: this worker, or another, is not about the same as the chief.
          WorkerError: a worker is missing.
        """
        return steps_done, last_step

    def failures_named(self) -> contextlib.AbstractContextManager[None]:
        """Converts TensorFlow's error into a WorkerError that names the missing worker.

        Raises:
          WorkerError: a worker is missing.
        """
        return contextlib.nullcontext()

    def leave(self, stopped_by: str | None) -> str | None:
        """Waits until all have come to their end, so that nobody misses what another still has to send.

        Args:
          stopped_by: what ended this worker's steps; None if another worker knows.

        Returns:
          What ended the run, the same in all workers.

        Raises:
          WorkerError: the chief is missing, which had yet to save.
        """
        return stopped_by
