"""--profile_steps: a profile of some steps, for TensorBoard's profile plugin."""

import contextlib
import pathlib
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.console import say
from tower_train.run.actions import Action, TrainingClock


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


class Profiler(Action):
    """Profiles some steps, as far as this start does them, and marks their beginnings and ends.

    A profile that fails costs the run only a line on standard output.

    Args:
      steps: the first and the last.
      train_dir: place of the profile for TensorBoard's plugin.
      clock: stopped while the profiler starts and while the profile is written.
      watchdog: informed of both.
    """

    def __init__(self, steps: tuple[int, ...], train_dir: pathlib.Path, clock: TrainingClock, watchdog: StepWatchdog):
        self._first, self._last = steps
        self._train_dir, self._clock, self._watchdog = train_dir, clock, watchdog
        self._begun_at = self._done = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Marks a step, done within this block, in the profile; begins the profile with the first of them."""
        if self._begun_at is None and self._first <= step <= self._last:
            self._begin(step)
        if self._begun_at is None:
            yield
            return
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
            yield
        self._done = step

    def is_due(self, step):
        return step == self._last

    def __call__(self, step, report):
        self.close()

    def close(self) -> None:
        """Writes the profile that has begun, if any."""
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is None:
            return
        try:
            with self._clock.stopped(), self._watchdog.doing("a profile to be written"):
                tf.profiler.experimental.stop()
        except (tf.errors.OpError, OSError) as error:
            self._say_failed(error)
            return
        say(f"Profiled: steps {begun_at} to {self._done}, for `tensorboard --logdir={self._train_dir}` with "
            "tensorboard-plugin-profile installed.")  # fmt: skip

    def _begin(self, step: int) -> None:
        try:
            with self._clock.stopped(), self._watchdog.doing("the profiler to start"):
                tf.profiler.experimental.start(str(self._train_dir))
        except (tf.errors.OpError, OSError) as error:
            self._say_failed(error)
            self._last = 0  # it is not tried again
        else:
            self._begun_at = step

    def _say_failed(self, error: Exception) -> None:
        say(f"*** --profile_steps={self._first},{self._last}: no profile ({errors.reason(error)}). The run goes on.")
