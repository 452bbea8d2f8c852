"""The guard against steps whose loss or gradients are not finite."""

from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run.actions import Action

v1 = tf.compat.v1
_MOST_DUMPS = 10  # batches written per start
_MOST_NAMES = 3  # in a message
_UNTOUCHED = (
    "This step has not changed the variables, and the last checkpoint stays. Try a lower --learning_rate, or look at "
    "the examples."
)


def check_variables(session, graph: TrainingGraph, step: int) -> None:
    """Raises NonFiniteError for a variable, before it is saved: updates may overflow with a finite loss and
    gradients."""
    bad = [name for name, is_finite in session.run(graph.saved.finite).items() if not is_finite]
    if bad:
        raise errors.NonFiniteError(
            f"not finite after step {step}: the update overflowed in {_shown(bad)}. It was not saved, and the last "
            "checkpoint stays. Try a lower --learning_rate."
        )


def what_is_not_finite(graph: TrainingGraph, report: StepReport) -> str:
    """Names the towers and tensors at fault in a step."""
    everywhere = "the mean over towers" + (" of all workers" if graph.layout.num_workers > 1 else "")
    rows = [f"tower_{i}" for i in range(graph.layout.num_towers)] + [everywhere]
    faults = []
    for row, flags in zip(rows, report.finite, strict=True):
        bad = [name for name, is_finite in zip(graph.checked, flags, strict=True) if not is_finite]
        if bad and not (faults and row == rows[-1]):  # the mean is at fault only if no tower is
            faults.append(f"{row}: {_shown(bad)}")
    return "; ".join(faults)


class NonFiniteGuard(v1.train.SessionRunHook):
    """Stops a program's steps at the first loss or gradient that is not finite; that step has changed no variable."""

    def __init__(self, graph: TrainingGraph):
        self._graph = graph

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._graph.report)

    def after_run(self, run_context, run_values):
        report = run_values.results
        if not report.finite.all():
            raise errors.NonFiniteError(
                f"not finite at step {report.step + 1}: {what_is_not_finite(self._graph, report)}. {_UNTOUCHED}"
            )


class Guard(Action):
    """Stops the run at a step that is not finite, or skips it, and names its examples.

    The graph has left the variables unchanged. A skipped step counts: global_step and examples_seen move on, so that
    each step keeps its examples. A step that fails only because the loss scale is too large is always skipped, and is
    no fault.

    Args:
      graph: the graph.
      most_in_a_row: number of such steps in a row that ends the run; None if the graph does not skip any.
      dump: writes the batch of (step, first position) to a file and returns its path; None: no batch is written.

    Attributes:
      loss: of the last step that was not skipped; None before one.
      skipped: number of steps skipped for a fault.
    """

    def __init__(self, graph: TrainingGraph, most_in_a_row: int | None, dump: Callable[[int, int], str] | None = None):
        self._graph, self._most_in_a_row, self._dump = graph, most_in_a_row, dump
        self._in_a_row = self._dumps = self.skipped = 0
        self.loss = None

    def __call__(self, step, report):
        if report.finite.all():
            self._in_a_row, self.loss = 0, report.loss
            return
        if report.loss_scale and report.loss_scale.overflowed:
            say(f"*** loss scale: too great at step {step}, which is skipped; now {report.loss_scale.scale:g}.")
            return
        skips, global_batch = self._most_in_a_row is not None, self._graph.layout.global_batch
        first = int(report.examples) - skips * global_batch  # a step that ends the run has not counted its examples
        about = f"not finite at step {step}: {what_is_not_finite(self._graph, report)}. Its batch: positions {first} "
        about += f"to {first + global_batch - 1} of the stream of examples{self._dumped(step, first)}"
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

    def _dumped(self, step: int, first: int) -> str:
        if not self._dump or self._dumps == _MOST_DUMPS:
            return ""
        self._dumps += 1
        return f", written to {self._dump(step, first)}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
