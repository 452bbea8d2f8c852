"""Checkpoints during training: saving and evaluating them, and going on if that fails."""

from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.states import StateExchange
from tower_train.console import say
from tower_train.graph.record import TrainingGraph
from tower_train.run import hooks, input_stream, nonfinite
from tower_train.run.evaluations import Evaluations
from tower_train.run.signals import Received
from tower_train.run.watchdog import Watchdog
from tower_train.run_dir import checkpoint, directory

v1 = tf.compat.v1


def checkpoint_writer(
    graph: TrainingGraph, run_dir: directory.RunDirectory, checkpoints: checkpoint.Checkpoints, logs: list,
    states: StateExchange | None = None,
) -> Callable[[v1.Session, int], str]:  # fmt: skip
    """Returns a function (session, step) that writes a checkpoint and returns its path.

    It flushes the records of `logs` first, so that they reach up to the step at which a killed run resumes. `states`
    sends other workers' positions.
    """

    def write(session: v1.Session, step: int) -> str:
        nonfinite.check_variables(session, graph, step)
        run_dir.keep()
        for log in logs:
            log.flush()
        if graph.stream_state:
            input_stream.save(session, graph.stream_state, states, step)
        return checkpoints.save(session, step)

    return write


class CheckpointHook(hooks.StepHook):
    """Saves every few steps, on request and at the end, and evaluates what it saved.

    If a save or an evaluation fails, earlier checkpoints stay, the run goes on, and the next interval tries again.
    `write` saves (session, step) and returns the checkpoint's path.

    Attributes:
      saved_step: the step of the last checkpoint; None before the first. A resumed run sets it.
      failures: number of failed saves.
      error: reason of the last save's failure; None if it succeeded.
      evaluation_error: the exception of the last evaluation; None if it succeeded.
    """

    def __init__(
        self, graph: TrainingGraph, every_steps: int, write: Callable[[v1.Session, int], str],
        evaluations: Evaluations, received: Received, watchdog: Watchdog, clock: hooks.TrainingClock,
    ):  # fmt: skip
        super().__init__(graph)
        self._every_steps, self._write = every_steps, write
        self._evaluations, self._received, self._watchdog, self._clock = evaluations, received, watchdog, clock
        self.saved_step, self._step = None, 0
        self.failures, self.error, self.evaluation_error = 0, None, None

    def after_create_session(self, session, coord):
        self._step = self.saved_step or 0
        if self._evaluations.pending:
            self._evaluate(self._evaluations.pending)
            # StopHook ends several workers, after the same step.
            if self._evaluations.best.is_over and self.graph.num_workers == 1:
                coord.request_stop()

    def after_step(self, run_context, report):
        self._step = step = int(report.step)
        requested, evaluating = self._is_requested(run_context.session, report), self._evaluations.is_due(step)
        if requested or evaluating or (self._every_steps and step % self._every_steps == 0):
            path = self._save(run_context.session, step)
            if requested and path:
                say(f"Saved {path}, as SIGUSR1 asks.")
            if evaluating and path:
                self._evaluate(path)

    def end(self, session):
        if self._step != self.saved_step:
            self._save(session, self._step)

    def _is_requested(self, session, report) -> bool:
        """Returns whether a signal asks to save; other workers that take part learn of it with the next step."""
        asked, wish = self._received.take_save_request(), self.graph.wishes.get("saving")
        if not wish:
            return asked
        if asked:
            session.run(wish.ask)
        elif report.saving > 0:
            session.run(wish.forget)
        return report.saving > 0

    def _evaluate(self, path: str) -> None:
        self.evaluation_error = None
        try:
            with self._clock.stopped(), self._watchdog.doing("an evaluation"):
                say(*self._evaluations.evaluate(path))
        except Exception as error:  # the workload's code may raise anything; the training has not failed
            self.evaluation_error = error
            say(f"*** The evaluation of {path} failed: {errors.reason(error)}. It is saved; the run goes on.")

    def _save(self, session, step: int) -> str | None:
        """Returns the checkpoint's path; None if it could not be saved."""
        try:
            with self._watchdog.doing("a save"):
                path = self._write(session, step)
        except (tf.errors.OpError, OSError) as error:
            self.failures += 1
            self.error = f"the checkpoint of step {step} could not be saved ({errors.reason(error)})"
            say(
                f"*** Failed save number {self.failures}: {self.error}. Those from before stay; the run goes on and "
                "tries again at the next save."
            )
            return None
        self.saved_step, self.error = step, None
        return path
