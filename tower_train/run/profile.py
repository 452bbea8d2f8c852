"""--profile_steps: a profile of some steps, for TensorBoard's profile plugin."""

import pathlib

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.graph.record import TrainingGraph
from tower_train.run.hooks import StepHook, TrainingClock
from tower_train.run.watchdog import Watchdog


def check(steps: tuple[int, ...] | None, steps_done: int, last_step: int) -> list[str]:
    """Returns lines about steps that this start will not do.

    Args:
      steps: the first and the last to profile, or None.
      steps_done: number of earlier steps.
      last_step: of the run.

    Raises:
      ConfigError: the run ends before them.
    """
    if steps and steps[0] > last_step:
        raise errors.ConfigError(
            f"--profile_steps={steps[0]},{steps[1]}: the run ends at step {last_step}. Choose earlier steps, or train "
            "longer."
        )
    if steps and steps[1] <= steps_done:
        return [f"*** --profile_steps={steps[0]},{steps[1]}: those steps were done before. Nothing is profiled."]
    return []


class ProfileHook(StepHook):
    """Profiles some steps, as far as this start does them, and marks their beginnings and ends.

    A profile that fails costs the run only a line on standard output.

    Args:
      graph: the graph.
      steps: the first and the last.
      train_dir: place of the profile for TensorBoard's plugin.
      clock: stopped while the profiler starts and while the profile is written.
      watchdog: informed of both.
    """

    def __init__(
        self, graph: TrainingGraph, steps: tuple[int, ...], train_dir: pathlib.Path, clock: TrainingClock,
        watchdog: Watchdog,
    ):  # fmt: skip
        super().__init__(graph)
        self._first, self._last = steps
        self._train_dir, self._clock, self._watchdog = train_dir, clock, watchdog
        self._began_at = self._mark = None

    def after_create_session(self, session, coord):
        self._next_step = int(session.run(self.graph.global_step)) + 1

    def before_run(self, run_context):
        if self._began_at is None and self._first <= self._next_step <= self._last:
            self._begin()
        if self._began_at is not None:
            self._mark = tf.profiler.experimental.Trace("train", step_num=self._next_step, _r=1)
            self._mark.__enter__()
        return super().before_run(run_context)

    def after_step(self, run_context, report):
        self._next_step = int(report.step) + 1
        self._end_mark()
        if report.step == self._last:
            self.close()

    def close(self) -> None:
        """Writes the profile that has begun, if any."""
        self._end_mark()
        began_at, self._began_at = self._began_at, None
        if began_at is None:
            return
        try:
            with self._clock.stopped(), self._watchdog.doing("a profile to be written"):
                tf.profiler.experimental.stop()
        except (tf.errors.OpError, OSError) as error:
            self._say_failed(error)
            return
        say(f"Profiled: steps {began_at} to {self._next_step - 1}, for `tensorboard --logdir={self._train_dir}` with "
            "tensorboard-plugin-profile installed.")  # fmt: skip

    def _begin(self) -> None:
        try:
            with self._clock.stopped(), self._watchdog.doing("the profiler to start"):
                tf.profiler.experimental.start(str(self._train_dir))
        except (tf.errors.OpError, OSError) as error:
            self._say_failed(error)
            self._last = 0  # it is not tried again
        else:
            self._began_at = self._next_step

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark:
            mark.__exit__(None, None, None)

    def _say_failed(self, error: Exception) -> None:
        say(f"*** --profile_steps={self._first},{self._last}: no profile ({errors.reason(error)}). The run goes on.")
