"""A start while its steps are done, and actions after a step: check of copies, log line and summary, the end."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.console import ProgressBar, say
from tower_train.graph.record import StepReport
from tower_train.run import messages
from tower_train.run.hooks import Action, UserHooks
from tower_train.run.prepare import Start
from tower_train.run.results import Result, StopReason
from tower_train.run.signals import Received
from tower_train.run.watchdog import StepWatchdog
from tower_train.run_dir import checkpoint, logs

v1 = tf.compat.v1
_MUCH_SECS = 1.0  # of waiting, from which advice is of use


@dataclasses.dataclass
class Running:
    """A start of a run while its steps are done, as their actions see it.

    Attributes:
      start: the start, with all options.
      session: with the graph.
      membership: of this worker.
      received: the signals so far.
      user_hooks: around each step.
      watchdog: looks whether steps end.
      step: the last that counted, over all starts.
      loss: at the last step that was not skipped; None before one.
      skipped_steps: updates that were skipped since they were not finite.
      failed_saves: number of them.
      failure: the error of the last save or evaluation, if it failed.
      is_over: whether no step follows.
      is_interrupted: whether a signal ended an evaluation.
      input_secs: that steps have waited for input.
      report: of the last step; None before one.
    """

    start: Start
    session: v1.Session
    membership: Membership
    received: Received
    user_hooks: UserHooks
    watchdog: StepWatchdog
    step: int
    loss: float | None = None
    skipped_steps: int = 0
    failed_saves: int = 0
    failure: errors.UserError | None = None
    is_over: bool = False
    is_interrupted: bool = False
    input_secs: float = 0.0
    report: StepReport | None = None
    _excluded_secs: float = 0.0
    _examples: int | None = None  # seen; of a resumed run known after its first step

    def begin(self) -> None:
        """Takes the time from here on, at the beginning of the first step."""
        self._began, self._first_ended, self._ended = self.now(), None, None
        self._examples = None if self.step else 0

    def now(self) -> float:
        """Returns the seconds since some moment, without those of `paused`."""
        return time.perf_counter() - self._excluded_secs

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes no time within this block, as of an evaluation, which would distort examples/sec."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded_secs += time.perf_counter() - start

    def count(self, report: StepReport) -> None:
        """Counts a step that has ended."""
        self.report = report
        self.step, self._ended, self._examples = int(report.step), self.now(), int(report.examples)
        if self._first_ended:  # the first step waits for the input to begin
            self.input_secs += float(report.input_secs)
        self._first_ended = self._first_ended or self._ended
        self.membership.note_step()

    def next_batch(self) -> str:
        """Describes the batch of the step under way."""
        step, size = f"step {self.step + 1}", self.start.graph.layout.global_batch
        if self._examples is None:
            return step
        return f"{step}, positions {self._examples} to {self._examples + size - 1} of the stream of examples"

    def stop_reason(self) -> StopReason | None:
        """Returns the reason of this worker to end the run before its last step; None if there is none."""
        if self.start.is_chief and self.start.evaluations.best.is_over:
            return StopReason.NO_GAIN
        if self.received.stopping:
            return StopReason(self.received.stopping.name)
        if self.membership.is_to_resize:
            return StopReason.RESIZED
        return StopReason.SESSION_HOOK if self.user_hooks.have_asked else None

    def result(self, seconds: float, failure: errors.UserError | None) -> Result:
        """Returns the result, given the seconds that it took and the error that ended the steps, if any."""
        start, steps = self.start, self.step - self.start.steps_done
        if failure:
            reason = StopReason.ERROR
        elif self.step >= start.last_step and not self.is_interrupted:
            reason = StopReason.LAST_STEP
        else:
            reason = self.stop_reason() or StopReason.ANOTHER_WORKER
        return Result(
            train_dir=str(start.run_dir.path) if start.is_chief else "",
            step=self.step,
            loss=self.loss,
            # Without the first step, which also prepares the graph.
            examples_per_sec=(steps - 1) * start.graph.layout.global_batch / (self._ended - self._first_ended)
            if steps > 1
            else None,
            seconds=seconds,
            training_secs=self._ended - self._began if steps else None,
            reason=reason,
            checkpoint=next(reversed(checkpoint.existing(start.run_dir.path)), None) if start.is_chief else None,
            data=start.examples.name,
            notice=start.examples.notice if start.examples.dataset != "auto" else None,  # a stand-in's
            failed_saves=self.failed_saves,
            skipped_steps=self.skipped_steps,
            failure=failure or self.failure,
        )


class ChooseExamples(Action):
    """Chooses the hard examples of a pass before the first step that has some of it, and begins the stream again."""

    def __init__(self, running: Running):
        self._graph, self._session, self._end = running.start.graph, running.session, running.start.end

    def begin(self):
        self._choose()  # what the last start had no step for, or where steps have another size now

    def is_due(self, step):
        return step < self._end  # else no step follows, whose examples the stream would fetch

    def __call__(self, step, report):
        batch, pass_at = self._graph.layout.global_batch, self._graph.choice.pass_at
        last = int(report.examples) - 1
        if pass_at(last + batch) > pass_at(last):
            self._choose()

    def _choose(self):
        if self._session.run(self._graph.choice.choose):
            self._session.run(self._graph.stream.initializer)


class MirrorCheck(Action):
    """Ends the run if copies of a variable differ, which happens only if a device or a link is faulty."""

    def __init__(self, running: Running):
        self._every_steps = running.start.config.check_mirrors_every_steps
        self._saved, self._session = running.start.graph.saved, running.session

    def is_due(self, step):
        return self._every_steps > 0 and step % self._every_steps == 0

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


class Log(Action):
    """Writes a line, a metrics.jsonl record and an event every few steps, as the original does, and of the last step;
    and the summary of a step that made one."""

    def __init__(self, running: Running, bar: ProgressBar, metrics: logs.MetricsFile, writer: logs.EventWriter):
        self._running, self._graph = running, running.start.graph
        self._every_steps = running.start.config.log_every_steps
        self._bar, self._metrics, self._writer = bar, metrics, writer
        self._last_step, self._since, self._input_secs = running.start.steps_done, running.now(), 0.0
        self._has_advised = False

    def is_due(self, step):
        return self._bar.is_shown or step % self._every_steps == 0 or self._running.start.is_summarized(step)

    def __call__(self, step, report):
        if report.summary:
            self._writer.add(step, summary=v1.Summary.FromString(report.summary))
        if step % self._every_steps == 0:
            self._log(step, report)
        else:
            self._bar.update(step)

    def end(self, step):
        if step != self._last_step:  # a short start, or one that a signal ended, has a line too
            self._log(step, self._running.report)

    def _log(self, step: int, report: StepReport) -> None:
        layout, now, loss = self._graph.layout, self._running.now(), float(report.loss)
        seconds, steps = now - self._since, step - self._last_step
        self._last_step, self._since = step, now
        examples_per_sec = steps * layout.global_batch / seconds
        sec_per_batch = seconds / (steps * sum(layout.towers_per_worker))
        input_share = (self._running.input_secs - self._input_secs) / seconds
        self._input_secs = self._running.input_secs
        is_slow = input_share >= messages.slow_input(self._running.start.run_json)
        say(messages.step_line(step, loss, examples_per_sec, sec_per_batch, input_share if is_slow else None))
        if is_slow and self._input_secs > _MUCH_SECS and not self._has_advised:
            self._has_advised = True
            say(messages.input_advice(input_share, self._running.start.run_json))
        self._bar.update(step, rates=f"loss {messages.as_loss(loss)}  {examples_per_sec:.0f} examples/sec")
        rates = {
            "learning_rate": float(report.learning_rate),
            "examples_per_sec": examples_per_sec,
            "input_share": input_share,
        }
        if report.loss_scale:
            rates["loss_scale"] = float(report.loss_scale)
        record = {
            "step": step,
            "examples": int(report.examples),
            "epoch": int(report.examples) / self._graph.examples.num_examples,
            "loss": loss if math.isfinite(loss) else None,  # a skipped step
            "sec_per_batch": sec_per_batch,
            **rates,
        }
        self._metrics.append(record)
        with self._running.paused():
            self._running.user_hooks.on_log(record)
        losses = {"total_loss": loss, "loss": float(report.data_loss)}
        logs.add_scalars(self._writer, losses | rates, step)


class Profile(Action):
    """Profiles some steps (--profile_steps), as far as this start does them; one that fails costs the run a line."""

    def __init__(self, running: Running):
        first, self._last = running.start.config.profile_steps or (0, 0)
        self._running, self._first, self._is_on = running, max(first, running.step + 1), False

    def begin(self):
        if self.is_due(self._running.step):
            self(self._running.step, None)

    def is_due(self, step):
        return self._first <= self._last and step in (self._first - 1, self._last)

    def __call__(self, step, report):
        if step == self._last:
            self.close()
        else:
            self._is_on = self._succeeds("the profiler to start", tf.profiler.experimental.start, self._folder)

    def close(self) -> None:
        """Writes the profile that has begun, if any."""
        if self._is_on and self._succeeds("a profile to be written", tf.profiler.experimental.stop):
            say(
                f"Profiled: steps {self._first} to {min(self._last, self._running.step)}, for `tensorboard "
                f"--logdir={self._folder}` with tensorboard-plugin-profile installed."
            )
        self._is_on = False

    @property
    def _folder(self) -> str:
        return str(self._running.start.run_dir.path)

    def _succeeds(self, what: str, function: Callable, *args) -> bool:
        try:
            with self._running.paused(), self._running.watchdog.doing(what):
                function(*args)
        except (tf.errors.OpError, OSError) as error:
            say(f"*** --profile_steps: no profile ({errors.reason(error)}). The run goes on.")
            return False
        return True


class Stop(Action):
    """Ends the run after the current step (several workers after the same one, the next) if there is a reason."""

    def __init__(self, running: Running):
        self._running, self._request = running, running.start.graph.ask_to_stop

    def begin(self):
        # A process by itself may do no step at all.
        self._running.is_over = not self._request and self._running.stop_reason() in (
            StopReason.NO_GAIN, StopReason.SESSION_HOOK,
        )  # fmt: skip

    def __call__(self, step, report):
        is_over = self._running.stop_reason() is not None
        if self._request:
            if is_over:
                self._running.session.run(self._request)
            is_over = report.stopping > 0
        self._running.is_over = is_over
