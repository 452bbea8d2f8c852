"""The actions that may be due after a step: the log line, the summary, the check of copies, users' hooks, the end."""

import contextlib
import math
import time
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.console import ProgressBar, say
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run import report as reporting
from tower_train.run.hooks import UserHooks
from tower_train.run.results import StopReason
from tower_train.run.signals import Received
from tower_train.run_dir import logs
from tower_train.run_dir.best import Best

v1 = tf.compat.v1


class Action:
    """Base of what may be due after a step; by default after each."""

    def is_due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, report: StepReport) -> None:
        """Acts on a step, from its report in numpy values."""

    def end(self, step: int) -> None:
        """Called after the last step of this start, unless an error ends it."""


class PeriodicAction(Action):
    """Base of what is due every few steps, at steps that do not depend on where a run was resumed."""

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def is_due(self, step):
        return self._every_steps > 0 and step % self._every_steps == 0


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


class Tally(Action):
    """Keeps the number and the time of the steps, for the result.

    Attributes:
      step: the last one that counted, over all starts.
    """

    def __init__(self, clock: TrainingClock, steps_done: int):
        self._clock, self._steps_done, self.step, self._steps = clock, steps_done, steps_done, 0
        self._began = self._first = self._last = 0.0

    def begin(self) -> None:
        """Notes that the first step begins."""
        self._began = self._clock.now()

    def __call__(self, step, report):
        self._last = self._clock.now()
        self._first, self._steps = self._first or self._last, self._steps + 1
        self.step = int(report.step)

    @property
    def training_secs(self) -> float | None:
        """Seconds from the beginning of the first step to the end of the last; None without steps."""
        return self._last - self._began if self.step > self._steps_done else None

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second after the first, which also prepares the graph; None without steps after it."""
        return (self._steps - 1) / (self._last - self._first) if self._steps > 1 else None


class MirrorCheck(PeriodicAction):
    """Ends the run if copies of a variable differ, which happens only if a device or a link is faulty."""

    def __init__(self, every_steps: int, graph: TrainingGraph, session: v1.Session):
        super().__init__(every_steps)
        self._graph, self._session = graph, session

    def __call__(self, step, report):
        fingerprints = self._session.run(self._graph.saved.fingerprints)
        copies, variables = (fingerprints != fingerprints[0]).nonzero()
        if len(copies):
            names = self._graph.saved.copied
            raise errors.MirrorError(
                f"after step {step} copy {copies[0]} of {names[variables[0]]} is not what copy 0 is; "
                f"{len(set(variables))} of {len(names)} variables differ. Nothing of this is saved: look after the "
                "devices, then go on from the last checkpoint with the same command."
            )


class Log(PeriodicAction):
    """Writes a line, a metrics.jsonl record and an event every few steps, with examples/sec since the last ones."""

    def __init__(
        self, every_steps: int, graph: TrainingGraph, steps_done: int, clock: TrainingClock, bar: ProgressBar,
        metrics: logs.MetricsFile, writer: logs.EventWriter,
    ):  # fmt: skip
        super().__init__(every_steps)
        self._graph, self._clock = graph, clock
        self._bar, self._metrics, self._writer = bar, metrics, writer
        self._last_step, self._since = steps_done, clock.now()

    def is_due(self, step):
        return self._bar.is_shown or super().is_due(step)

    def __call__(self, step, report):
        if not super().is_due(step):
            self._bar.update(step)
            return
        graph, now, loss = self._graph, self._clock.now(), float(report.loss)
        seconds, steps = now - self._since, step - self._last_step
        self._last_step, self._since = step, now
        examples_per_sec = steps * graph.layout.global_batch / seconds
        sec_per_batch = seconds / (steps * sum(graph.layout.towers_of_each))
        say(reporting.step_line(step, loss, examples_per_sec, sec_per_batch))
        self._bar.update(step, rates=f"loss {reporting.as_loss(loss)}  {examples_per_sec:.0f} examples/sec")
        scale = {"loss_scale": float(report.loss_scale.scale)} if report.loss_scale else {}
        learning_rate = float(report.learning_rate)
        self._metrics.append({
            "step": step,
            "examples": int(report.examples),
            "epoch": int(report.examples) / graph.examples.num_examples,
            "loss": loss if math.isfinite(loss) else None,  # a skipped step
            "learning_rate": learning_rate,
            "examples_per_sec": examples_per_sec,
            "sec_per_batch": sec_per_batch,
            **scale,
        })  # fmt: skip
        losses = {"total_loss": loss, "cross_entropy": float(report.cross_entropy)}
        curves = losses | {"learning_rate": learning_rate} | scale | {"examples_per_sec": examples_per_sec}
        logs.add_scalars(self._writer, curves, step)


class Summary(PeriodicAction):
    """Writes the step's summary every few steps."""

    def __init__(self, every_steps: int, writer: logs.EventWriter):
        super().__init__(every_steps)
        self._writer = writer

    def __call__(self, step, report):
        self._writer.add(step, summary=v1.Summary.FromString(report.summary))


class CallUserHooks(Action):
    """Calls users' hooks with what they fetched, and at the end."""

    def __init__(self, hooks: UserHooks, session: v1.Session):
        self._hooks, self._session = hooks, session

    def __call__(self, step, report):
        self._hooks.after_step()

    def end(self, step):
        self._hooks.end(self._session)


class Stop(Action):
    """Ends the run after the current step (several workers after the same one, the next) if there is a reason.

    Args:
      received: signals.
      membership: of this worker.
      user_hooks: which may ask to stop.
      best: knows whether there was no gain for too long; None in workers that are not the chief.

    Attributes:
      is_now: whether the run ends after this step.
    """

    def __init__(self, received: Received, membership: Membership, user_hooks: UserHooks, best: Best | None):
        self._received, self._membership, self._hooks, self._best = received, membership, user_hooks, best
        self._has_asked = self.is_now = False

    def begin(self, graph: TrainingGraph, session: v1.Session) -> None:
        """Begins with a session; a process by itself may end before its first step."""
        self._graph, self._session = graph, session
        no_gain = self._best and self._best.is_over
        self.is_now = graph.layout.num_workers == 1 and bool(no_gain or self._hooks.have_asked)

    def reason(self) -> StopReason | None:
        """Returns the reason why the run ends before its last step; None if it does not."""
        if self._best and self._best.is_over:
            return StopReason.NO_GAIN
        if self._received.stopping:
            return StopReason(self._received.stopping.name)
        if self._membership.is_to_resize:
            return StopReason.RESIZED
        return StopReason.SESSION_HOOK if self._hooks.have_asked else None

    def __call__(self, step, report):
        self.is_now = self.reason() is not None
        if self._graph.layout.num_workers > 1:
            if self.is_now and not self._has_asked:
                self._session.run(self._graph.requests["stopping"].ask)
                self._has_asked = True
            self.is_now = report.stopping > 0
