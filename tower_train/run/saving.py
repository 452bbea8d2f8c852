"""When checkpoints are saved, and what becomes of a run that cannot save."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tower_train.graph.record import TrainingGraph
from tower_train.run import hooks
from tower_train.run_dir import checkpoint


class CheckpointHook(hooks.StepHook):
    """Saves every few steps, when asked to and at the end, and runs the evaluation on what it saved.

    A save that fails costs no checkpoint from before. The run goes on and tries again at the next interval.

    Attributes:
      failures: how many saves failed.
      error: why the last one failed; None where it did not.
    """

    def __init__(
        self, graph: TrainingGraph, save: Callable[[Any, int], str], every: int, is_evaluated: Callable[[int], bool],
        evaluate: Callable[[str], None], save_requested: Callable[[], bool], warn: Callable[[str], None],
    ):  # fmt: skip
        """Args: the graph; what saves (session, step) and returns the checkpoint's path; steps between saves, 0 for
        none; whether there is an evaluation after a step; what evaluates a checkpoint; whether a save is asked for now;
        what prints a line."""
        super().__init__(graph)
        self._save_to_disk, self._every = save, every
        self._is_evaluated, self.evaluate = is_evaluated, evaluate
        self._save_requested, self._warn = save_requested, warn
        self._saved_step = None
        self.failures, self.error = 0, None

    def after_create_session(self, session, coord):
        step = int(session.run(self.graph.global_step))
        self._saved_step = step if step else None

    def after_step(self, run_context, report):
        step = int(report.step)
        requested = self._save_requested()
        evaluating = self._is_evaluated(step)
        if requested or evaluating or (self._every and step % self._every == 0):
            path = self._save(run_context.session, step)
            if requested and path:
                self._warn(f"Saved {path}, as SIGUSR1 asks.")
            if evaluating and path:
                self.evaluate(path)

    def end(self, session):
        step = int(session.run(self.graph.global_step))
        if step != self._saved_step:
            self._save(session, step)

    def _save(self, session, step: int) -> str | None:
        """Returns the checkpoint's path; None where it could not be saved."""
        try:
            path = self._save_to_disk(session, step)
        except (tf.errors.OpError, OSError) as error:
            self.failures += 1
            self.error = f"the checkpoint of step {step} could not be saved ({checkpoint.reason(error)})"
            self._warn(
                f"*** Failed save number {self.failures}: {self.error}. Those from before stay; the run goes on and "
                "tries again at the next save."
            )
            return None
        self._saved_step, self.error = step, None
        return path
