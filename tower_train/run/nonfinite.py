"""The guard against steps whose loss or gradients are not finite."""

import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration, say
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run.actions import Action, Running

v1 = tf.compat.v1
_MOST_NAMES = 3  # in a message
_UNTOUCHED = (
    "This step has not changed the variables, and the last checkpoint stays. Try a lower --learning_rate, or look at "
    "the examples."
)


class Guard(Action):
    """Stops the run at a step that is not finite, or skips it, and names its examples.

    The graph has left the variables unchanged. A skipped step counts: global_step and examples_seen move on, so that
    each step keeps its examples. A step that fails only because the loss scale is too large is always skipped, and is
    no fault.

    Attributes:
      loss: of the last step that was not skipped; None before one.
      skipped: number of steps skipped for a fault.
    """

    def __init__(self, running: Running):
        self._start, config = running.start, running.start.config
        self._most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
        self._in_a_row = self.skipped = 0
        self.loss: float | None = None

    def __call__(self, step, report):
        if report.finite.all():
            self._in_a_row, self.loss = 0, report.loss
            return
        if report.loss_scale and report.loss_scale.overflowed:
            say(f"*** loss scale: too great at step {step}, which is skipped; now {report.loss_scale.scale:g}.")
            return
        skips, global_batch = self._most_in_a_row is not None, self._start.graph.layout.global_batch
        first = int(report.examples) - skips * global_batch  # a step that ends the run has not counted its examples
        about = f"not finite at step {step}: {_what_is_not_finite(self._start.graph, report)}. Its batch: positions "
        about += f"{first} to {first + global_batch - 1} of the stream of examples"
        if not skips:
            raise errors.NonFiniteError(f"{about}. {_UNTOUCHED}")
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self._most_in_a_row:
            raise errors.NonFiniteError(
                f"{about}. It is number {self._in_a_row} in a row, as many as --max_nonfinite_in_a_row allows. "
                f"{_UNTOUCHED}"
            )
        say(f"*** {about}. Skipped: the variables are as before; {self.skipped} skipped since this start.")


def check_variables(session: v1.Session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {enumeration(bad, _MOST_NAMES)}. It was not "
            "saved, and the last checkpoint stays. Try a lower --learning_rate."
        )


def _what_is_not_finite(graph: TrainingGraph, report: StepReport) -> str:
    """Names the towers and tensors at fault in a step."""
    everywhere = "the mean over towers" + (" of all workers" if graph.layout.num_workers > 1 else "")
    rows = [f"tower_{i}" for i in range(graph.layout.num_towers)] + [everywhere]
    faults = []
    for row, flags in zip(rows, report.finite, strict=True):
        bad = [name for name, is_finite in zip(graph.checked, flags, strict=True) if not is_finite]
        if bad and not (faults and row == everywhere):  # the mean is at fault only if no tower is
            faults.append(f"{row}: {enumeration(bad, _MOST_NAMES)}")
    return "; ".join(faults)
