"""Checkpoints during training: saving and evaluating them, and going on if that fails."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration, say
from tower_train.graph.record import TrainingGraph
from tower_train.run.results import save_error
from tower_train.run.training import Action, Training
from tower_train.run_dir import logs

v1 = tf.compat.v1
_MOST_NAMES = 3  # in a message


class _Interrupted(Exception):
    """A signal during an evaluation."""


class Saver(Action):
    """Saves every few steps and at the end, and evaluates what it saved. After a failed save or evaluation earlier
    checkpoints stay, the run goes on, and the next interval tries again. metrics, writer: flushed before each save."""

    def __init__(self, training: Training, metrics: logs.MetricsFile, writer: logs.EventWriter):
        self._training, self._metrics, self._writer = training, metrics, writer
        self._saved_step = training.step or None  # a start without steps saves nothing anew
        self._save_error, self._evaluation_error = None, None
        self._owes_evaluation = False  # until there is a checkpoint for it, if a save fails

    def begin(self):
        if path := self._training.evaluations.pending:  # which the last start left
            self._evaluate(path)

    def is_due(self, step):
        return self._training.plan.config.is_saved(step) or self._training.evaluations.is_due(step)

    def __call__(self, step, report):
        self._owes_evaluation |= self._training.evaluations.is_due(step)
        self._save(step)

    def end(self, step):
        if step != self._saved_step:
            self._save(step)
        if error := self._evaluation_error:
            self._training.failure = errors.EvaluationError(
                f"training ended at step {step} and is saved, but the last evaluation failed: {errors.reason(error)}. "
                "Correct that, then evaluate it with `python -m tower_train.evaluate`."
            )
            self._training.failure.__cause__ = error
        self._training.failure = self._save_error or self._training.failure

    def _save(self, step: int) -> None:
        """Saves, and evaluates if that is owed."""
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
            return
        self._saved_step, self._save_error = step, None
        if self._owes_evaluation:
            self._evaluate(path)

    def _write(self, step: int) -> str:
        """Returns the path of the new checkpoint."""
        session, graph, store = self._training.session, self._training.graph, self._training.membership.store
        # before anything is written, as the rotation would delete a good one for it
        _check_variables(session, graph, step)
        # another process may have taken the directory over while this one was suspended
        self._training.plan.run_dir.check_held()
        for log in (self._metrics, self._writer):  # so that they reach up to the step at which a killed run resumes
            log.flush()
        if state := graph.stream.state:
            session.run(state.write)
            # the other workers have positions of their own
            if store:
                assign(session, state.variables[1:], store.collect(step))
        return self._training.checkpoints.save(session, step)

    def _evaluate(self, path: str) -> None:
        self._evaluation_error, self._owes_evaluation = None, False
        try:
            with self._training.paused(), self._training.watchdog.doing("an evaluation"):
                say(*self._training.evaluations.evaluate(path, self._after_batch))
                self._metrics.append(record := self._training.evaluations.record)
        except _Interrupted:
            self._training.is_interrupted = True
            say(f"*** The evaluation of {path} was interrupted by {self._training.received.stopping.name}.")
            return
        except Exception as error:  # the workload's code may raise anything; the training has not failed
            self._evaluation_error = error
            say(f"*** The evaluation of {path} failed: {errors.reason(error)}. It is saved; the run goes on.")
            return
        with self._training.paused():  # outside of `try`: an error of the user's function ends the run
            self._training.user.on_evaluate(record)

    def _after_batch(self) -> None:
        """Ends an evaluation at a signal."""
        if self._training.received.stopping:
            raise _Interrupted


class SendPosition(Action):
    """Sends this worker's position in a stream with a state to the chief, after each step that the chief saves."""

    def __init__(self, training: Training):
        self._training, self._sent_step = training, training.step or None

    def is_due(self, step):
        return self._training.plan.config.is_saved(step)

    def __call__(self, step, report):
        session, state = self._training.session, self._training.graph.stream.state
        session.run(state.write)
        self._training.membership.store.send(step, session.run(state.variables[state.worker]))
        self._sent_step = step

    def end(self, step):
        if step != self._sent_step:
            self(step, None)


def assign(session: v1.Session, variables: Sequence[tf.Variable], values: Sequence[bytes]) -> None:
    """Gives variables values; the graph may be final."""
    for variable, value in zip(variables, values, strict=True):
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _check_variables(session: v1.Session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {enumeration(bad, _MOST_NAMES)}. It was not "
            "saved, and the last checkpoint stays. Try a lower --learning_rate."
        )
