"""Standard SessionRunHooks around each step: log lines, summaries, the check of copies, stopping."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.console import ProgressBar, say
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run import report as reporting
from tower_train.run_dir import logs

v1 = tf.compat.v1


class StepHook(v1.train.SessionRunHook):
    """Base of hooks that look at every step. All fetch the same few scalars, so TensorFlow prepares only one step."""

    def __init__(self, graph: TrainingGraph):
        self.graph = graph

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self.graph.report)

    def after_run(self, run_context, run_values):
        self.after_step(run_context, run_values.results)

    def after_step(self, run_context, report: StepReport):
        """Called after each step with its report in numpy values."""


class TrainingClock:
    """Seconds of training, without evaluations and the like, which would distort examples/sec."""

    def __init__(self):
        self._excluded = 0.0

    def now(self) -> float:
        """Returns seconds since some moment."""
        return time.perf_counter() - self._excluded

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock within this block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start


class LogHook(StepHook):
    """Writes a line, a metrics.jsonl record and an event every few steps, with examples/sec since the last ones."""

    def __init__(
        self, graph: TrainingGraph, every: int, clock: TrainingClock, bar: ProgressBar, metrics: logs.MetricsFile,
        writer: logs.EventWriter,
    ):  # fmt: skip
        super().__init__(graph)
        self._every, self._clock = every, clock
        self._bar, self._metrics, self._writer = bar, metrics, writer
        self._steps = self._since = 0

    def after_create_session(self, session, coord):
        self._steps, self._since = 0, self._clock.now()

    def after_step(self, run_context, report):
        self._steps += 1
        step, loss = int(report.step), float(report.loss)
        if step % self._every:
            self._bar.update(step)
            return
        now = self._clock.now()
        seconds, steps = now - self._since, self._steps
        self._steps, self._since = 0, now
        examples_per_sec = steps * self.graph.global_batch / seconds
        sec_per_batch = seconds / (steps * sum(self.graph.towers_of_each))
        say(reporting.step_line(step, loss, examples_per_sec, sec_per_batch))
        self._bar.update(step, rates=f"loss {reporting.as_loss(loss)}  {examples_per_sec:.0f} examples/sec")
        record = {
            "step": step,
            "examples": int(report.examples),
            "epoch": int(report.examples) / self.graph.num_examples,
            "loss": loss if math.isfinite(loss) else None,  # a skipped step
            "learning_rate": float(report.learning_rate),
            "examples_per_sec": examples_per_sec,
            "sec_per_batch": sec_per_batch,
        }
        if report.loss_scale:
            record["loss_scale"] = float(report.loss_scale.scale)
        self._metrics.append(record)
        logs.add_scalars(self._writer, _curves(report) | {"examples_per_sec": examples_per_sec}, step)


def _curves(report: StepReport) -> dict[str, float]:
    values = {"total_loss": report.loss, "cross_entropy": report.cross_entropy, "learning_rate": report.learning_rate}
    if report.loss_scale:
        values["loss_scale"] = report.loss_scale.scale
    return {tag: float(value) for tag, value in values.items()}


class SummaryHook(StepHook):
    """Writes the step's summary every few steps, at steps that do not depend on where a run was resumed."""

    def __init__(self, graph: TrainingGraph, every: int, writer: logs.EventWriter, steps_done: int):
        super().__init__(graph)
        self._every, self._writer, self._next_step = every, writer, steps_done + 1

    def before_run(self, run_context):
        if self._next_step % self._every:
            return None
        return v1.train.SessionRunArgs(self.graph.summary)

    def after_run(self, run_context, run_values):
        if run_values.results is not None:
            self._writer.add(self._next_step, summary=v1.Summary.FromString(run_values.results))
        self._next_step += 1


class MirrorCheck(StepHook):
    """Ends the run if copies of a variable differ, which happens only if a device or a link is faulty."""

    def __init__(self, graph: TrainingGraph, every: int):
        super().__init__(graph)
        self._every = every

    def after_step(self, run_context, report):
        if report.step % self._every:
            return
        fingerprints = run_context.session.run(self.graph.fingerprints)
        copies, variables = (fingerprints != fingerprints[0]).nonzero()
        if len(copies):
            name = self.graph.copied[variables[0]]
            raise errors.MirrorError(
                f"after step {report.step} copy {copies[0]} of {name} is not what copy 0 is; {len(set(variables))} of "
                f"{len(self.graph.copied)} variables differ. Nothing of this is saved: look after the devices, then "
                "go on from the last checkpoint with the same command."
            )


class StopHook(StepHook):
    """Asks for the end after the last step, or after the current one (with several workers the next) if
    early_stop()."""

    def __init__(self, graph: TrainingGraph, last_step: int, early_stop: Callable[[], object]):
        super().__init__(graph)
        self._last_step, self._early_stop = last_step, early_stop
        self._has_asked = False

    def after_step(self, run_context, report):
        stopping = self._early_stop() is not None
        if self.graph.num_workers > 1:  # all workers must end after the same step
            if stopping and not self._has_asked:
                run_context.session.run(self.graph.wishes["stopping"].ask)
                self._has_asked = True
            stopping = report.stopping > 0
        if report.step >= self._last_step or stopping:
            run_context.request_stop()


class UserHook(v1.train.SessionRunHook):
    """A user's hook. Keeps requests to stop from the session, since all workers end after the same step.

    Attributes:
      has_asked: whether it has asked to stop.
    """

    def __init__(self, hook: v1.train.SessionRunHook):
        self._hook, self.has_asked = hook, False
        self.begin, self.after_create_session, self.end = hook.begin, hook.after_create_session, hook.end

    def before_run(self, run_context):
        return self._call(self._hook.before_run, run_context)

    def after_run(self, run_context, run_values):
        self._call(self._hook.after_run, run_context, run_values)

    def _call(self, method, run_context, *values):
        context = v1.train.SessionRunContext(run_context.original_args, run_context.session)
        answer = method(context, *values)
        self.has_asked |= context.stop_requested
        return answer


class LastValues(StepHook):
    """Keeps the last step's values and the time of the steps, for the result."""

    def __init__(self, graph: TrainingGraph, clock: TrainingClock):
        super().__init__(graph)
        self._clock = clock
        self.step = self.loss = None
        self.steps = 0
        self._began = self._first = self._last = 0.0

    def before_run(self, run_context):
        self._began = self._began or self._clock.now()
        return super().before_run(run_context)

    def after_step(self, run_context, report):
        self._last = self._clock.now()
        self._first = self._first or self._last
        self.step, self.steps = int(report.step), self.steps + 1
        # The loss of a step without an update means nothing.
        self.loss = float(report.loss) if report.finite.all() else self.loss

    @property
    def training_secs(self) -> float | None:
        """Returns seconds from the beginning of the first step to the end of the last."""
        return self._last - self._began if self.steps else None

    @property
    def steps_per_sec(self) -> float | None:
        """Returns steps per second after the first, which also prepares the graph."""
        return (self.steps - 1) / (self._last - self._first) if self.steps > 1 else None
