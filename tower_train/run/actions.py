"""Actions after a step: check that it was finite, choice of hard examples, check of copies, log line and summary,
profile."""

import math
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.console import ProgressBar, say
from tower_train.graph import gradients
from tower_train.graph.record import StepReport
from tower_train.run import messages
from tower_train.run.training import Action, Training
from tower_train.run_dir import logs

v1 = tf.compat.v1
_MOST_IN_A_ROW = 10  # skipped steps: bad examples are rare, so more of them are a network that has diverged
_UNTOUCHED = (
    "This step has not changed the variables, and the last checkpoint stays. Try a lower --learning_rate, or look at "
    "the examples."
)


class Guard(Action):
    """Ends the run at a step that is not finite, or skips it, and names its examples.

    The graph has left the variables unchanged. A skipped step counts: global_step and examples_seen move on, so that
    each step keeps its examples.
    """

    def __init__(self, training: Training):
        self._training, self._in_a_row = training, 0
        self._skips = training.plan.config.on_nonfinite == "skip"

    def __call__(self, step, report):
        if report.finite.all():
            self._in_a_row, self._training.loss = 0, float(report.loss)
            return
        if report.overflowed:  # no fault, but how float16 finds its loss scale
            say(f"*** loss scale: too great at step {step}, which is skipped; now {report.loss_scale:g}.")
            return
        layout = self._training.graph.layout
        # a step that ends the run has not counted its examples
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


class ChooseExamples(Action):
    """Chooses the hard examples of a pass before the first step that has some of it, and begins the stream again."""

    def __init__(self, training: Training):
        self._graph, self._session, self._end = training.graph, training.session, training.plan.end

    def begin(self):
        self._choose()  # the last start may have ended just before, or with steps of another size

    def is_due(self, step):
        return step < self._end  # else the stream would fetch examples for a step that does not come

    def __call__(self, step, report):
        batch, pass_at = self._graph.layout.global_batch, self._graph.choice.pass_at
        last = int(report.examples) - 1
        if pass_at(last + batch) > pass_at(last):  # the next step has some of another pass
            self._choose()

    def _choose(self):
        if self._session.run(self._graph.choice.choose):  # batches fetched ahead were of the old choice
            self._session.run(self._graph.stream.initializer)


class MirrorCheck(Action):
    """Ends the run if copies of a variable differ, which happens only if a device or a link is faulty."""

    def __init__(self, training: Training):
        self._every_steps = training.plan.config.check_mirrors_every_steps
        self._saved, self._session = training.graph.saved, training.session

    def is_due(self, step):
        return step % self._every_steps == 0

    def __call__(self, step, report):
        fingerprints = self._session.run(self._saved.fingerprints)
        # over copies of all workers and variables; hashes, so that no weights travel
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

    def __init__(self, training: Training, bar: ProgressBar, metrics: logs.MetricsFile, writer: logs.EventWriter):
        self._training, self._graph = training, training.graph
        self._every_steps = training.plan.config.log_every_steps
        self._bar, self._metrics, self._writer = bar, metrics, writer
        self._last_step, self._since, self._input_secs = training.plan.steps_done, training.now(), 0.0

    def is_due(self, step):
        return self._bar.is_shown or self._has_line(step) or self._training.is_summarized(step)

    def __call__(self, step, report):
        if report.summary:
            self._writer.add(step, summary=v1.Summary.FromString(report.summary))
        if self._has_line(step):
            self._log(step, report)
        else:
            self._bar.update(step)

    def end(self, step):
        if step != self._last_step:  # a start that ended early has a line too
            self._log(step, self._training.report)

    def _has_line(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._training.plan.end  # before its evaluation

    def _log(self, step: int, report: StepReport) -> None:
        layout, now, loss = self._graph.layout, self._training.now(), float(report.loss)
        seconds, steps = now - self._since, step - self._last_step
        self._last_step, self._since = step, now
        examples_per_sec = steps * layout.global_batch / seconds
        sec_per_batch = seconds / (steps * sum(layout.towers_per_worker))
        input_share = (self._training.input_secs - self._input_secs) / seconds
        self._input_secs = self._training.input_secs
        on_gpus = self._training.plan.devices.names[0].startswith("GPU")
        say(messages.step_line(step, loss, examples_per_sec, sec_per_batch, input_share, on_gpus))
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
        with self._training.paused():
            self._training.user.on_log(record)
        # in events, like the original's, "loss" is without weight decay; in the record it is with it
        losses = {"total_loss": loss, "loss": float(report.data_loss)}
        logs.add_scalars(self._writer, losses | rates, step)


class Profile(Action):
    """Profiles those of --profile_steps that this start does; a failure costs the run a line."""

    def __init__(self, training: Training):
        first, self._last = training.plan.config.profile_steps or (0, 0)
        self._training, self._first, self._is_on = training, max(first, training.step + 1), False
        self._folder = str(training.plan.run_dir.path)

    def begin(self):  # a profile begins after the step before its first one, which may be of an earlier start
        if self.is_due(self._training.step):
            self(self._training.step, None)

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
                f"Profiled: steps {self._first} to {min(self._last, self._training.step)}, for `tensorboard "
                f"--logdir={self._folder}` with tensorboard-plugin-profile installed."
            )
        self._is_on = False

    def _succeeds(self, what: str, function: Callable, *args) -> bool:
        try:
            with self._training.paused(), self._training.watchdog.doing(what):
                function(*args)
        except (tf.errors.OpError, OSError) as error:
            say(f"*** --profile_steps: no profile ({errors.reason(error)}). The run goes on.")
            return False
        return True
