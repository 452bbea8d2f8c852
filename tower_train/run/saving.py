"""Checkpoints during training: saving and evaluating them, and going on if that fails."""

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.graph.record import StepReport
from tower_train.run import nonfinite, sessions
from tower_train.run.actions import Action, Running
from tower_train.run.results import save_error
from tower_train.run_dir import logs

v1 = tf.compat.v1


class Saver(Action):
    """Saves every few steps, on request and at the end, and evaluates what it saved.

    If a save or an evaluation fails, earlier checkpoints stay, the run goes on, and the next interval tries again.

    Args:
      running: the start in the chief.
      metrics, writer: flushed before each save, so that their records reach up to the step at which a killed run
        resumes.

    Attributes:
      failures: number of failed saves.
    """

    def __init__(self, running: Running, metrics: logs.MetricsFile, writer: logs.EventWriter):
        self._running, self._start, self._logs = running, running.start, (metrics, writer)
        self._request = running.start.graph.requests.get("saving")
        self._saved_step = running.start.steps_done or None
        self.failures, self._save_error, self._evaluation_error = 0, None, None

    def begin(self) -> None:
        """Evaluates the checkpoint of an earlier start that was killed before that."""
        if self._start.evaluations.pending:
            self._evaluate(self._start.evaluations.pending)

    def __call__(self, step, report):
        requested, evaluating = self._is_requested(report), self._start.evaluations.is_due(step)
        if requested or self._start.config.is_saved(step) or evaluating:
            path = self._save(step)
            if requested and path:
                say(f"Saved {path}, as SIGUSR1 asks.")
            if evaluating and path:
                self._evaluate(path)

    def end(self, step):
        if step != self._saved_step:
            self._save(step)

    def failure(self, step: int) -> errors.UserError | None:
        """Returns the error of a training that ended with a step, if its last save or evaluation failed."""
        if self._save_error:
            return save_error(step, self._save_error)
        if not self._evaluation_error:
            return None
        error = errors.EvaluationError(
            f"training ended at step {step} and is saved, but the last evaluation failed: "
            f"{errors.reason(self._evaluation_error)}. Mend that, then evaluate it with `python -m "
            "tower_train.evaluate`."
        )
        error.__cause__ = self._evaluation_error
        return error

    def _is_requested(self, report: StepReport) -> bool:
        """Returns whether a signal asks to save; other workers that take part learn of it with the next step."""
        asked = self._running.received.take_save_request()
        if not self._request:
            return asked
        if asked:
            self._running.session.run(self._request.ask)
        elif report.saving > 0:
            self._running.session.run(self._request.forget)
        return report.saving > 0

    def _evaluate(self, path: str) -> None:
        self._evaluation_error = None
        try:
            with self._running.clock.stopped(), self._running.watchdog.doing("an evaluation"):
                say(*self._start.evaluations.evaluate(path))
        except Exception as error:  # the workload's code may raise anything; the training has not failed
            self._evaluation_error = error
            say(f"*** The evaluation of {path} failed: {errors.reason(error)}. It is saved; the run goes on.")

    def _save(self, step: int) -> str | None:
        """Returns the checkpoint's path; None if it could not be saved."""
        try:
            with self._running.watchdog.doing("a save"):
                path = self._write(step)
        except (tf.errors.OpError, OSError) as error:
            self.failures += 1
            self._save_error = f"the checkpoint of step {step} could not be saved ({errors.reason(error)})"
            say(
                f"*** Failed save number {self.failures}: {self._save_error}. Those from before stay; the run goes on "
                "and tries again at the next save."
            )
            return None
        self._saved_step, self._save_error = step, None
        return path

    def _write(self, step: int) -> str:
        session, graph, board = self._running.session, self._start.graph, self._running.membership.board
        nonfinite.check_variables(session, graph, step)
        self._start.run_dir.check_held()
        for log in self._logs:
            log.flush()
        if state := graph.stream.state:
            session.run(state.write)
            if board:
                sessions.assign(session, state.variables[1:], board.collect(step))
        return self._start.resumed.checkpoints.save(session, step)


class SendPosition(Action):
    """Sends a worker's position in a stream that has a state to the chief after each step that the chief saves, and
    after the last one."""

    def __init__(self, running: Running):
        self._session, self._board, self._config = running.session, running.membership.board, running.start.config
        self._state, self._sent_step = running.start.graph.stream.state, running.start.steps_done or None

    def is_due(self, step):
        return self._state is not None

    def __call__(self, step, report):
        if report.saving > 0 or self._config.is_saved(step):
            self._send(step)

    def end(self, step):
        if self._state and step != self._sent_step:
            self._send(step)

    def _send(self, step: int) -> None:
        self._session.run(self._state.write)
        self._board.send(step, self._session.run(self._state.variables[self._state.worker]))
        self._sent_step = step
