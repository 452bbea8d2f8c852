"""A training that is open: its step, its counts and clock, what is due after a step, and the loop over the steps."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.graph.record import StepReport, TrainingGraph
from tower_train.run.evaluations import Evaluations
from tower_train.run.plan import Plan
from tower_train.run.results import Result, StopReason
from tower_train.run.signals import Received
from tower_train.run.watchdog import StepWatchdog
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1


class Action:
    """Base of what may be due after a step; by default after each."""

    def begin(self) -> None:
        """Called before the first step."""

    def is_due(self, step: int) -> bool:
        return True

    def __call__(self, step: int, report: StepReport) -> None:
        """Acts on a step, from its report in numpy values."""

    def end(self, step: int) -> None:
        """Called after the last step of this start, unless an error ends it."""


class UserFunctions(Action):
    """A user's functions after each step, log line and evaluation."""

    def __init__(
        self,
        after_step: Callable[[int, StepReport], bool | None] | None = None,
        on_log: Callable[[dict], None] | None = None,
        on_evaluate: Callable[[dict], None] | None = None,
    ):
        self._after_step = after_step
        # called with metrics.jsonl's records
        self.on_log, self.on_evaluate = on_log or (lambda record: None), on_evaluate or (lambda record: None)
        self.have_asked = False  # to stop; kept, since all workers end after the same step

    def is_due(self, step):
        return self._after_step is not None

    def __call__(self, step, report):
        self.have_asked |= bool(self._after_step(step, report))


class Training:
    """A training in an open session, as its actions see it."""

    def __init__(
        self, plan: Plan, graph: TrainingGraph, membership: Membership, received: Received, user: UserFunctions
    ):
        self.plan, self.graph, self.membership, self.received = plan, graph, membership, received
        self.user = user
        # filled by open_training, in the order in which it can make them:
        self.checkpoints: checkpoint.Checkpoints | None = None  # the chief's
        # sets all variables from the chief's checkpoint; None for initial values, and in other workers
        self.restore: Callable[[v1.Session], None] | None = None
        self.evaluations: Evaluations | None = None  # the chief's
        self.example_images: bytes | None = None  # a PNG of a new run's first examples, if it was drawn
        self.watchdog: StepWatchdog | None = None
        self.session: v1.Session | None = None
        self.actions: Sequence[Action] = ()  # due after a step, in this order
        self.step = plan.steps_done  # the last that counted, over all starts
        self.report: StepReport | None = None  # of that step
        self.loss: float | None = None  # at the last step that was not skipped
        self.skipped_steps = 0  # as they were not finite
        self.failed_saves = 0
        self.failure: errors.UserError | None = None  # of the last save or evaluation
        self.is_left = False  # the program has left its loop over the steps
        self.is_interrupted = False  # a signal ended an evaluation
        self.input_secs = 0.0  # that steps have waited for input
        self._opened = time.perf_counter()
        # by `now`: begin and end of the first step, end of the last one
        self._began, self._first_ended, self._ended = None, None, None
        self._excluded_secs = 0.0  # in `paused`
        self._examples: int | None = None  # seen; of a resumed run known after its first step

    def steps(self) -> Iterator[StepReport]:
        """Does one step for each next(): yields its report, in numpy values, after the actions that are due. Leaving
        the loop early saves and ends the run, as a signal does."""
        plain, summarized = self._calls()
        for action in self.actions:
            action.begin()
        self._began, self._examples = self.now(), None if self.step else 0
        # a process by itself may do no step at all; several must agree, which takes one
        is_over = not self.graph.ask_to_stop and self.stop_reason() is StopReason.NO_GAIN
        for step in range(self.plan.steps_done + 1, self.plan.end + 1):
            if is_over:
                break
            self.watchdog.begin_step()
            with tf.profiler.experimental.Trace("train", step_num=step, _r=1):  # marks it in a profile
                report = summarized() if self.is_summarized(step) else plain()
            self.watchdog.end_step()
            self._count(report)
            for action in self.actions:
                if action.is_due(step):  # asked in each step, so this must cost next to nothing
                    action(step, report)
            if not self.is_left:  # else all workers stop after the same step, which may be the next one
                try:
                    yield report
                except GeneratorExit:
                    self.is_left = True
            is_over = self._is_over()
        for action in self.actions:
            action.end(self.step)

    def _calls(self) -> list[Callable[[], StepReport]]:
        """Returns a function that does a step and returns its report, and another that adds the step's summary."""
        report, summary = self.graph.report, self.graph.summary
        fetches = report, report._replace(summary=() if summary is None else summary)
        # not Session.run, which would look each time at what to fetch
        return [self.session.make_callable(each) for each in fetches]

    def _count(self, report: StepReport) -> None:
        """Counts a step that has ended."""
        self.report = report
        # the graph counts, not Python: a resumed or skipped step may differ
        self.step, self._ended, self._examples = int(report.step), self.now(), int(report.examples)
        if self._first_ended:  # the first step waits for the input to begin
            self.input_secs += float(report.input_secs)
        self._first_ended = self._first_ended or self._ended
        self.membership.note_step()

    def _is_over(self) -> bool:
        """Returns whether no step follows the last one: if there is a reason in one process, or once the means of
        several workers carry the request of one, which is after its next step."""
        is_over, request = self.stop_reason() is not None, self.graph.ask_to_stop
        if request and is_over:
            self.session.run(request)
        return self.report.stopping > 0 if request else is_over

    def now(self) -> float:
        """Returns the seconds of a clock that stops within `paused`."""
        return time.perf_counter() - self._excluded_secs

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock within this block, such as an evaluation, which would distort examples/sec."""
        start = time.perf_counter()  # not `now`, which this block stops
        try:
            yield
        finally:
            self._excluded_secs += time.perf_counter() - start

    def is_summarized(self, step: int) -> bool:
        """Returns whether a step makes a summary, which only the chief writes."""
        every = self.plan.config.summary_every_steps if self.plan.is_chief else 0
        return every > 0 and step % every == 0

    def describe_batch(self) -> str:
        """Describes the batch of the step under way."""
        step, size = f"step {self.step + 1}", self.graph.layout.global_batch
        if self._examples is None:
            return step
        return f"{step}, positions {self._examples} to {self._examples + size - 1} of the stream of examples"

    def stop_reason(self) -> StopReason | None:
        """Returns the reason of this worker to end the run before its last step; None if there is none."""
        # if there are several, the one that a user should hear of
        was_over = self.plan.end < self.plan.last_step  # before this start, in all workers
        if was_over or (self.evaluations and self.evaluations.best.is_over):
            return StopReason.NO_GAIN
        if self.received.stopping:
            return StopReason(self.received.stopping.name)
        if self.membership.is_to_resize:
            return StopReason.RESIZED
        return StopReason.PROGRAM if self.is_left or self.user.have_asked else None

    def result(self, failure: errors.UserError | None) -> Result:
        """Returns the result, given the error that ended the steps, if any."""
        plan, steps = self.plan, self.step - self.plan.steps_done
        if failure:
            reason = StopReason.ERROR
        elif self.step >= plan.last_step and not self.is_interrupted:
            reason = StopReason.LAST_STEP
        else:
            reason = self.stop_reason() or StopReason.ANOTHER_WORKER
        return Result(
            train_dir=str(plan.run_dir.path) if plan.is_chief else "",
            step=self.step,
            loss=self.loss,
            # without the first step, in which TensorFlow prepares the graph
            examples_per_sec=(steps - 1) * self.graph.layout.global_batch / (self._ended - self._first_ended)
            if steps > 1 and self._ended > self._first_ended
            else None,
            seconds=time.perf_counter() - self._opened,
            training_secs=self._ended - self._began if steps else None,
            reason=reason,
            checkpoint=next(reversed(checkpoint.existing(plan.run_dir.path)), None) if plan.is_chief else None,
            data=plan.examples.name,
            notice=plan.examples.notice if plan.examples.dataset != "auto" else None,  # a stand-in's
            failed_saves=self.failed_saves,
            skipped_steps=self.skipped_steps,
            failure=failure or self.failure,
        )
