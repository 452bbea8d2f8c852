"""Checkpoints during training: saving and evaluating them, and going on if that fails."""

from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.board import Board
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.console import say
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run import input_stream, nonfinite
from tower_train.run.actions import Action, TrainingClock
from tower_train.run.evaluations import Evaluations
from tower_train.run.signals import Received
from tower_train.run_dir import checkpoint, directory

v1 = tf.compat.v1


def checkpoint_writer(
    graph: TrainingGraph, run_dir: directory.RunDirectory, checkpoints: checkpoint.Checkpoints, logs: list,
    board: Board | None = None,
) -> Callable[[v1.Session, int], str]:  # fmt: skip
    """Returns a function (session, step) that writes a checkpoint and returns its path.

    It flushes the records of `logs` first, so that they reach up to the step at which a killed run resumes. `board`
    sends other workers' positions.
    """

    def write(session: v1.Session, step: int) -> str:
        nonfinite.check_variables(session, graph, step)
        run_dir.keep()
        for log in logs:
            log.flush()
        if graph.stream.state:
            input_stream.save(session, graph.stream.state, board, step)
        return checkpoints.save(session, step)

    return write


class Saver(Action):
    """Saves every few steps, on request and at the end, and evaluates what it saved.

    If a save or an evaluation fails, earlier checkpoints stay, the run goes on, and the next interval tries again.

    Args:
      every_steps: between checkpoints; 0: on request and at the end only.
      write: saves (session, step) and returns the checkpoint's path.
      evaluations: of checkpoints, some of which it evaluates.
      received: signals, which may ask to save.
      watchdog, clock: informed of saves and evaluations.
      saved_step: the step of the last checkpoint; None before the first.

    Attributes:
      failures: number of failed saves.
      error: reason of the last save's failure; None if it succeeded.
      evaluation_error: the exception of the last evaluation; None if it succeeded.
    """

    def __init__(
        self, every_steps: int, write: Callable[[v1.Session, int], str], evaluations: Evaluations, received: Received,
        watchdog: StepWatchdog, clock: TrainingClock, saved_step: int | None,
    ):  # fmt: skip
        self._every_steps, self._write, self._saved_step = every_steps, write, saved_step
        self._evaluations, self._received, self._watchdog, self._clock = evaluations, received, watchdog, clock
        self.failures, self.error, self.evaluation_error = 0, None, None

    def begin(self, graph: TrainingGraph, session: v1.Session) -> None:
        """Begins with a session; evaluates the checkpoint of an earlier start that was killed before that."""
        self._session, self._saving = session, graph.requests.get("saving")
        if self._evaluations.pending:
            self._evaluate(self._evaluations.pending)

    def __call__(self, step, report):
        requested, evaluating = self._is_requested(report), self._evaluations.is_due(step)
        if requested or evaluating or (self._every_steps and step % self._every_steps == 0):
            path = self._save(step)
            if requested and path:
                say(f"Saved {path}, as SIGUSR1 asks.")
            if evaluating and path:
                self._evaluate(path)

    def end(self, step):
        if step != self._saved_step:
            self._save(step)

    def _is_requested(self, report: StepReport) -> bool:
        """Returns whether a signal asks to save; other workers that take part learn of it with the next step."""
        asked = self._received.take_save_request()
        if not self._saving:
            return asked
        if asked:
            self._session.run(self._saving.ask)
        elif report.saving > 0:
            self._session.run(self._saving.forget)
        return report.saving > 0

    def _evaluate(self, path: str) -> None:
        self.evaluation_error = None
        try:
            with self._clock.stopped(), self._watchdog.doing("an evaluation"):
                say(*self._evaluations.evaluate(path))
        except Exception as error:  # the workload's code may raise anything; the training has not failed
            self.evaluation_error = error
            say(f"*** The evaluation of {path} failed: {errors.reason(error)}. It is saved; the run goes on.")

    def _save(self, step: int) -> str | None:
        """Returns the checkpoint's path; None if it could not be saved."""
        try:
            with self._watchdog.doing("a save"):
                path = self._write(self._session, step)
        except (tf.errors.OpError, OSError) as error:
            self.failures += 1
            self.error = f"the checkpoint of step {step} could not be saved ({errors.reason(error)})"
            say(
                f"*** Failed save number {self.failures}: {self.error}. Those from before stay; the run goes on and "
                "tries again at the next save."
            )
            return None
        self._saved_step, self.error = step, None
        return path
