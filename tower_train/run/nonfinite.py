"""The guard against steps whose loss or gradients are not finite."""

import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration, say
from tower_train.graph import gradients
from tower_train.graph.record import TrainingGraph
from tower_train.run.hooks import Action
from tower_train.run.training import Training

v1 = tf.compat.v1
_MOST_NAMES = 3  # in a message
_MOST_IN_A_ROW = 10  # skipped steps: bad examples are rare, so more of them are a network that has diverged
_UNTOUCHED = (
    "This step has not changed the variables, and the last checkpoint stays. Try a lower --learning_rate, or look at "
    "the examples."
)


class Guard(Action):
    """Stops the run at a step that is not finite, or skips it, and names its examples.

    The graph has left the variables unchanged. A skipped step counts: global_step and examples_seen move on, so that
    each step keeps its examples. A step that fails only because the loss scale is too large is always skipped, and is
    no fault.
    """

    def __init__(self, training: Training):
        self._training, self._in_a_row = training, 0
        self._skips = training.plan.config.on_nonfinite == "skip"

    def __call__(self, step, report):
        if report.finite.all():
            self._in_a_row, self._training.loss = 0, float(report.loss)
            return
        if report.overflowed:
            say(f"*** loss scale: too great at step {step}, which is skipped; now {report.loss_scale:g}.")
            return
        layout = self._training.graph.layout
        # A step that ends the run has not counted its examples.
        first = int(report.examples) - (layout.global_batch if self._skips else 0)
        failure = (
            f"not finite at step {step}: "
            f"{gradients.describe_not_finite(report.finite, self._training.graph.checked, layout.num_workers)}. Its "
            f"batch: positions {first} to {first + layout.global_batch - 1} of the stream of examples"
        )
        if not self._skips:
            raise errors.NonFiniteError(f"{failure}. {_UNTOUCHED}")
        self._training.skipped_steps += 1
        self._in_a_row += 1
        if self._in_a_row == _MOST_IN_A_ROW:
            raise errors.NonFiniteError(f"{failure}. It is number {self._in_a_row} in a row. {_UNTOUCHED}")
        skipped = f"{self._training.skipped_steps} skipped since this start"
        say(f"*** {failure}. Skipped: the variables are as before; {skipped}.")


def check_variables(session: v1.Session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {enumeration(bad, _MOST_NAMES)}. It was not "
            "saved, and the last checkpoint stays. Try a lower --learning_rate."
        )
