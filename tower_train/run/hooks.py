"""What happens between steps, as standard SessionRunHooks: guard, log, checkpoints, evaluation, stopping."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.graph.build import StepReport, TrainingGraph
from tower_train.run import checkpoint
from tower_train.run import report as reporting

v1 = tf.compat.v1


class StepHook(v1.train.SessionRunHook):
    """Base of hooks that look at every step: fetches the same few scalars, whichever of them a hook needs, so that
    TensorFlow prepares one step and not several."""

    def __init__(self, graph: TrainingGraph):
        self.graph = graph

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self.graph.report)

    def after_run(self, run_context, run_values):
        self.after_step(run_context, run_values.results)

    def after_step(self, run_context, report: StepReport):
        """Called after each step with its report in numpy values."""


class NonFiniteGuard(StepHook):
    """Stops the run at the first loss or gradient that is not finite; the step has not changed the variables."""

    def after_step(self, run_context, report):
        if report.finite.all():
            return
        rows = [f"tower_{i}" for i in range(self.graph.num_towers)] + ["the mean over towers"]
        found = []
        for row, flags in zip(rows, report.finite, strict=True):
            bad = [name for name, is_finite in zip(self.graph.checked, flags, strict=True) if not is_finite]
            if bad and not (found and row == rows[-1]):  # the mean is at fault only where no tower is
                found.append(f"{row}: {', '.join(bad[:3])}{f' and {len(bad) - 3} more' if len(bad) > 3 else ''}")
        raise errors.NonFiniteError(
            f"not finite at step {report.step + 1}: {'; '.join(found)}. This step has not changed the variables, and "
            "the last checkpoint stays. Try a lower --learning_rate, or look at the examples."
        )


class TrainingClock:
    """Seconds of training: stands still during evaluations, whose time says nothing about examples/sec."""

    def __init__(self):
        self._excluded = 0.0

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter() - self._excluded

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Within this block the clock stands still."""
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start


class LogHook(StepHook):
    """One line, one metrics.jsonl record and one event every few steps; examples/sec covers the whole time since the
    last of them."""

    def __init__(self, graph: TrainingGraph, every: int, clock: TrainingClock, console, metrics_path, writer):
        super().__init__(graph)
        self._every, self._clock = every, clock
        self._console, self._path, self._writer = console, metrics_path, writer
        self._steps = self._since = 0

    def after_create_session(self, session, coord):
        self._file = open(self._path, "a", buffering=1)
        self._steps, self._since = 0, self._clock.now()

    def after_step(self, run_context, report):
        self._steps += 1
        step, loss = int(report.step), float(report.loss)
        if step % self._every:
            self._console.advance(step)
            return
        now = self._clock.now()
        seconds, steps = now - self._since, self._steps
        self._steps, self._since = 0, now
        examples_per_sec = steps * self.graph.global_batch / seconds
        sec_per_batch = seconds / (steps * self.graph.num_towers)
        self._console.line(reporting.step_line(step, loss, examples_per_sec, sec_per_batch))
        self._console.advance(step, loss=f"{loss:.2f}", rate=f"{examples_per_sec:.0f}")
        record = {
            "step": step,
            "examples": int(report.examples),
            "epoch": int(report.examples) / self.graph.num_examples,
            "loss": loss,
            "learning_rate": float(report.learning_rate),
            "examples_per_sec": examples_per_sec,
            "sec_per_batch": sec_per_batch,
        }
        self._file.write(json.dumps(record) + "\n")
        self._writer.add_summary(scalars({"examples_per_sec": examples_per_sec}), step)

    def end(self, session):
        self._file.close()


class SummaryHook(StepHook):
    """Writes the step's summary every few steps, at steps that do not depend on where a run was resumed."""

    def __init__(self, graph: TrainingGraph, every: int, writer: v1.summary.FileWriter):
        super().__init__(graph)
        self._every, self._writer = every, writer

    def after_create_session(self, session, coord):
        self._next_step = int(session.run(self.graph.global_step)) + 1

    def before_run(self, run_context):
        if self._next_step % self._every:
            return None
        return v1.train.SessionRunArgs(self.graph.summary)

    def after_run(self, run_context, run_values):
        if run_values.results is not None:
            self._writer.add_summary(run_values.results, self._next_step)
        self._next_step += 1


class CheckpointHook(StepHook):
    """Saves every few steps and at the end, and runs the evaluation on what it saved."""

    def __init__(self, graph: TrainingGraph, checkpoints: checkpoint.Checkpoints, every: int,
                 evaluate_every: int, evaluate: Callable[[str], None]):  # fmt: skip
        super().__init__(graph)
        self._checkpoints, self._every = checkpoints, every
        self._evaluate_every, self._evaluate = evaluate_every, evaluate
        self._saved_step = None

    def after_create_session(self, session, coord):
        step = int(session.run(self.graph.global_step))
        self._saved_step = step if step else None

    def after_step(self, run_context, report):
        step = int(report.step)
        evaluating = self._evaluate_every and step % self._evaluate_every == 0
        if evaluating or (self._every and step % self._every == 0):
            path = self._save(run_context.session, step)
            if evaluating:
                self._evaluate(path)

    def end(self, session):
        step = int(session.run(self.graph.global_step))
        if step != self._saved_step:
            self._save(session, step)

    def _save(self, session, step: int) -> str:
        self._saved_step = step
        return self._checkpoints.save(session, step)


class StopHook(StepHook):
    """Asks for the end after the last step, or after the step under way when a signal came."""

    def __init__(self, graph: TrainingGraph, last_step: int, signal_received: Callable[[], int | None]):
        super().__init__(graph)
        self._last_step, self._signal_received = last_step, signal_received

    def after_step(self, run_context, report):
        if report.step >= self._last_step or self._signal_received():
            run_context.request_stop()


class LastValues(StepHook):
    """Keeps the last step's values and the time of the steps, for the result."""

    def __init__(self, graph: TrainingGraph, clock: TrainingClock):
        super().__init__(graph)
        self._clock = clock
        self.step = self.loss = None
        self.steps = 0
        self._first = self._last = 0.0

    def after_step(self, run_context, report):
        self._last = self._clock.now()
        self._first = self._first or self._last
        self.step, self.loss, self.steps = int(report.step), float(report.loss), self.steps + 1

    @property
    def steps_per_sec(self) -> float | None:
        """Steps after the first, which also prepares the graph, per second."""
        return (self.steps - 1) / (self._last - self._first) if self.steps > 1 else None


def scalars(values: dict[str, float]) -> v1.Summary:
    """A Summary of plain numbers by tag."""
    return v1.Summary(value=[v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
