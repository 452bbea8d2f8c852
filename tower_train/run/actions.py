"""The actions that may be due after a step: the check of copies, log line, summary, users' hooks, the end."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.console import ProgressBar, say
from tower_train.graph.record import StepReport
from tower_train.run import report as reporting
from tower_train.run.hooks import UserHooks
from tower_train.run.prepare import Start
from tower_train.run.results import StopReason
from tower_train.run.signals import Received
from tower_train.run_dir import logs

v1 = tf.compat.v1


class TrainingClock:
    """Seconds of training, without evaluations and the like, which would augment examples/sec."""

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


@dataclasses.dataclass(frozen=True)
class Running:
    """A start of a run while its steps are done, as their actions see it.

    Attributes:
      start: the start, with all options.
      session: with the graph.
      membership: of this worker.
      received: the signals so far.
      user_hooks: around each step.
      watchdog: looks whether steps end.
      clock: the time of training.
    """

    start: Start
    session: v1.Session
    membership: Membership
    received: Received
    user_hooks: UserHooks
    watchdog: StepWatchdog
    clock: TrainingClock


class Action:
    """Base of what may be due after a step; by default after each."""

    def is_due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, report: StepReport) -> None:
        """Acts on a step, from its report in numpy values."""

    def end(self, step: int) -> None:
        """Called after the last step of this start, unless an error ends it."""


class PeriodicAction(Action):
    """Base of what is due every few steps (0: never), at steps that do not depend on where a run was resumed."""

    def __init__(self, every_steps: int):
        self._every_steps = every_steps

    def is_due(self, step):
        return self._every_steps > 0 and step % self._every_steps == 0


class Tally(Action):
    """Keeps the number and the time of the steps, for the result.

    Attributes:
      step: the last one that counted, over all starts.
    """

    def __init__(self, running: Running):
        self._clock, self.step, self._steps = running.clock, running.start.steps_done, 0
        self._began = self._first = self._last = running.clock.now()

    def begin(self) -> None:
        """Notes that the first step begins."""
        self._began = self._clock.now()

    def __call__(self, step, report):
        self._last, self._steps, self.step = self._clock.now(), self._steps + 1, int(report.step)
        if self._steps == 1:
            self._first = self._last

    @property
    def training_secs(self) -> float:
        """Seconds from the beginning of the first step to the end of the last."""
        return self._last - self._began

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second after the first, which also prepares the graph; None without steps after it."""
        return (self._steps - 1) / (self._last - self._first) if self._steps > 1 else None


class MirrorCheck(PeriodicAction):
    """Ends the run if copies of a variable differ, which happens only if a device or a link is faulty."""

    def __init__(self, running: Running):
        super().__init__(running.start.config.check_mirrors_every_steps)
        self._saved, self._session = running.start.graph.saved, running.session

    def __call__(self, step, report):
        fingerprints = self._session.run(self._saved.fingerprints)
        copies, variables = (fingerprints != fingerprints[0]).nonzero()
        if len(copies):
            names = self._saved.copied
            raise errors.MirrorError(
                f"after step {step} copy {copies[0]} of {names[variables[0]]} is not what copy 0 is; "
                f"{len(set(variables))} of {len(names)} variables differ. Nothing of this is saved: look after the "
                "devices, then go on from the last checkpoint with the same command."
            )


class Log(PeriodicAction):
    """Writes a line, a metrics.jsonl record and an event every few steps, with examples/sec since the last ones."""

    def __init__(self, running: Running, bar: ProgressBar, metrics: logs.MetricsFile, writer: logs.EventWriter):
        super().__init__(running.start.config.log_every_steps)
        self._graph, self._clock = running.start.graph, running.clock
        self._bar, self._metrics, self._writer = bar, metrics, writer
        self._last_step, self._since = running.start.steps_done, self._clock.now()

    def is_due(self, step):
        return self._bar.is_shown or super().is_due(step)

    def __call__(self, step, report):
        if not super().is_due(step):
            self._bar.update(step)
            return
        layout, now, loss = self._graph.layout, self._clock.now(), float(report.loss)
        seconds, steps = now - self._since, step - self._last_step
        self._last_step, self._since = step, now
        examples_per_sec = steps * layout.global_batch / seconds
        sec_per_batch = seconds / (steps * sum(layout.towers_of_each))
        say(reporting.step_line(step, loss, examples_per_sec, sec_per_batch))
        self._bar.update(step, rates=f"loss {reporting.as_loss(loss)}  {examples_per_sec:.0f} examples/sec")
        scale = {"loss_scale": float(report.loss_scale.scale)} if report.loss_scale else {}
        learning_rate = float(report.learning_rate)
        self._metrics.append({
            "step": step,
            "examples": int(report.examples),
            "epoch": int(report.examples) / self._graph.examples.num_examples,
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

    def __init__(self, running: Running, writer: logs.EventWriter):
        super().__init__(running.start.config.summary_every_steps)
        self._writer = writer

    def __call__(self, step, report):
        self._writer.add(step, summary=v1.Summary.FromString(report.summary))


class CallUserHooks(Action):
    """Calls users' hooks with what they fetched, and at the end."""

    def __init__(self, running: Running):
        self._hooks, self._session = running.user_hooks, running.session

    def is_due(self, step):
        return bool(self._hooks)

    def __call__(self, step, report):
        self._hooks.after_step()

    def end(self, step):
        self._hooks.end(self._session)


class Stop(Action):
    """Ends the run after the current step (several workers after the same one, the next) if there is a reason.

    Attributes:
      is_now: whether the run ends after this step.
    """

    def __init__(self, running: Running):
        self._running, self._request = running, running.start.graph.requests.get("stopping")
        self._has_asked = self.is_now = False

    def begin(self) -> None:
        """Notes reasons of a process by itself to do no step at all."""
        self.is_now = not self._request and self.reason() in (StopReason.NO_GAIN, StopReason.SESSION_HOOK)

    def reason(self) -> StopReason | None:
        """Returns the reason why the run ends before its last step; None if it does not."""
        running = self._running
        if running.start.is_chief and running.start.evaluations.best.is_over:
            return StopReason.NO_GAIN
        if running.received.stopping:
            return StopReason(running.received.stopping.name)
        if running.membership.is_to_resize:
            return StopReason.RESIZED
        return StopReason.SESSION_HOOK if running.user_hooks.have_asked else None

    def __call__(self, step, report):
        self.is_now = self.reason() is not None
        if self._request:
            if self.is_now and not self._has_asked:
                self._running.session.run(self._request.ask)
                self._has_asked = True
            self.is_now = report.stopping > 0
