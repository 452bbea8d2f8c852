"""Checkpoints during training: saving and evaluating them, and going on if that fails."""

import time
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration, say
from tower_train.examples import Examples
from tower_train.graph.record import TrainingGraph
from tower_train.run import sessions
from tower_train.run.hooks import Action
from tower_train.run.results import save_error
from tower_train.run.training import Training
from tower_train.run_dir import logs

v1 = tf.compat.v1
LONG_SECS = 10.0  # of an evaluation, which then says how far it is
_MOST_NAMES = 3  # in a message


class _Interrupted(Exception):
    """A signal during an evaluation."""


class Saver(Action):
    """Saves every few steps and at the end, and evaluates what it saved. After a failed save or evaluation earlier
    checkpoints stay, the run goes on, and the next interval tries again. metrics, writer: flushed before each save."""

    def __init__(self, training: Training, metrics: logs.MetricsFile, writer: logs.EventWriter):
        self._training, self._plan, self._logs = training, training.plan, (metrics, writer)
        self._saved_step = training.step or None  # a start without steps saves nothing anew
        self._save_error, self._evaluation_error = None, None
        self._owes_evaluation = False

    def begin(self):
        for path in self._training.evaluations.pending:  # which earlier starts left
            if not self._training.is_interrupted:
                self._evaluate(path)

    def is_due(self, step):
        return self._plan.config.is_saved(step) or self._training.evaluations.is_due(step)

    def __call__(self, step, report):
        # kept until there is a checkpoint to evaluate, if this save fails
        self._owes_evaluation |= self._training.evaluations.is_due(step)
        path = self._save(step)
        if path and self._owes_evaluation:
            self._evaluate(path)

    def end(self, step):
        if step != self._saved_step and (path := self._save(step)) and self._owes_evaluation:
            self._evaluate(path)
        if error := self._evaluation_error:
            self._training.failure = errors.EvaluationError(
                f"training ended at step {step} and is saved, but the last evaluation failed: {errors.reason(error)}. "
                "Correct that, then evaluate it with `python -m tower_train.evaluate`."
            )
            self._training.failure.__cause__ = error
        self._training.failure = self._save_error or self._training.failure

    def _evaluate(self, path: str) -> None:
        self._evaluation_error, self._owes_evaluation = None, False
        try:
            with self._training.paused(), self._training.watchdog.doing("an evaluation"):
                say(*self._training.evaluations.evaluate(path, self._after_batch()))
                self._logs[0].append(record := self._training.evaluations.record)
        except _Interrupted:
            self._training.is_interrupted = True
            say(f"*** The evaluation of {path} was interrupted by {self._training.received.stopping.name}.")
            return
        except Exception as error:  # the workload's code may raise anything; the training has not failed
            self._evaluation_error = error
            say(f"*** The evaluation of {path} failed: {errors.reason(error)}. It is saved; the run goes on.")
            return
        with self._training.paused():  # outside of `try`: an error of the user's function ends the run
            self._training.user_hooks.on_evaluate(record)

    def _after_batch(self) -> Callable[[int, Examples], None]:
        """Returns the function that ends an evaluation at a signal, and tells once of a long one how far it is."""
        began, is_told = time.monotonic(), False

        def after_batch(count: int, examples: Examples) -> None:
            nonlocal is_told
            if self._training.received.stopping:
                raise _Interrupted
            if not is_told and (seconds := time.monotonic() - began) > LONG_SECS:
                is_told = True
                say(
                    f"Evaluating: {count} of {examples.num_examples} examples of {examples.name} after {seconds:.0f} s."
                )

        return after_batch

    def _save(self, step: int) -> str | None:
        """Returns the checkpoint's path; None if it could not be saved."""
        try:
            with self._training.watchdog.doing("a save"):
                path = self._write(step)
        except (tf.errors.OpError, OSError) as error:
            self._training.failed_saves += 1
            why = f"the checkpoint of step {step} could not be saved ({errors.reason(error)})"
            self._save_error = save_error(step, why)  # if it is the last one
            say(
                f"*** Failed save number {self._training.failed_saves}: {why}. Those from before stay; the run goes on "
                "and tries again at the next save."
            )
            return None
        self._saved_step, self._save_error = step, None
        return path

    def _write(self, step: int) -> str:
        session, graph, store = self._training.session, self._training.graph, self._training.membership.store
        # before anything is written, as the rotation would delete a good one for it
        _check_variables(session, graph, step)
        # another process may have taken the directory over while this one was suspended
        self._plan.run_dir.check_held()
        for log in self._logs:  # so that they reach up to the step at which a killed run resumes
            log.flush()
        if state := graph.stream.state:
            session.run(state.write)
            # the other workers have positions of their own
            if store:
                sessions.assign(session, state.variables[1:], store.collect(step))
        return self._training.checkpoints.save(session, step)


class SendPosition(Action):
    """Sends a worker's position in a stream with a state to the chief, after each step that the chief saves."""

    def __init__(self, training: Training):
        self._session, self._store, self._config = training.session, training.membership.store, training.plan.config
        self._state, self._sent_step = training.graph.stream.state, training.step or None

    def is_due(self, step):
        return self._state is not None and self._config.is_saved(step)

    def __call__(self, step, report):
        self._session.run(self._state.write)
        self._store.send(step, self._session.run(self._state.variables[self._state.worker]))
        self._sent_step = step

    def end(self, step):
        if self._state and step != self._sent_step:
            self(step, None)


def _check_variables(session: v1.Session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {enumeration(bad, _MOST_NAMES)}. It was not "
            "saved, and the last checkpoint stays. Try a lower --learning_rate."
        )
