"""The end of a program that is a worker: it leaves the cluster with the others, or tells them why it ends."""

import atexit
import os
import sys
from collections.abc import Callable

from tower_train import errors
from tower_train.cluster import step_errors
from tower_train.cluster.single_process import SingleProcess
from tower_train.console import notice

IN_ONE_LINE = (errors.ConfigError, errors.RunError, errors.WorkerError)


class Ending:
    """Takes part in Python's end of a program.

    The cluster is told of an uncaught exception and explains it; one that names a worker or an option becomes one line,
    and its status the process's. Otherwise the process leaves when all others do.
    """

    def __init__(self):
        self._membership, self._shutdown, self._status = None, lambda error=None: None, 0
        self._excepthook, sys.excepthook = sys.excepthook, self._note
        atexit.register(self._leave)

    def of(self, membership: SingleProcess, shutdown: Callable[[BaseException | None], None]) -> None:
        """Sets the cluster's membership and Cluster.shutdown."""
        self._membership, self._shutdown = membership, shutdown

    def _note(self, kind, error, trace) -> None:
        """Python's excepthook."""
        if self._membership and step_errors.is_of_another_session(error, self._membership.target):
            error = errors.ConfigError(
                "A session was opened in which there are no other workers. Open it with master=cluster.target, which "
                f"is {self._membership.target!r}."
            )
        elif self._membership and step_errors.may_be_anothers(error):
            error = self._membership.failure_behind(error)
        if isinstance(error, KeyboardInterrupt):
            error.exit_status = 130  # as of the shell, and for the others too
        self._shutdown(error)
        if isinstance(error, IN_ONE_LINE):
            self._end_with(error)
        else:
            self._excepthook(kind, error, trace)

    def _leave(self) -> None:
        try:
            self._shutdown()
        except errors.UserError as error:
            self._end_with(error)
        if self._status:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(self._status)

    def _end_with(self, error: errors.UserError) -> None:
        notice(f"error: {error}")
        self._status = error.exit_status
