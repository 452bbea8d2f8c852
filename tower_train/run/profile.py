"""--profile_steps: a profile of some steps, for TensorBoard's profile plugin."""

from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.run.actions import Running
from tower_train.run.hooks import Action

_profiler = tf.profiler.experimental


class Profiler(Action):
    """Profiles some steps, as far as this start does them; sessions.one_step marks each.

    A profile that fails costs the run only a line on standard output.
    """

    def __init__(self, running: Running):
        first, self._last = running.start.config.profile_steps or (0, 0)
        self._running, self._first = running, max(first, running.start.steps_done + 1)
        self._is_on = False

    def begin(self):
        if self._running.start.steps_done + 1 == self._first <= self._last:
            self._start()

    def is_due(self, step):
        return step in (self._first - 1, self._last)

    def __call__(self, step, report):
        if step == self._last:
            self.close()
        else:
            self._start()

    def _start(self) -> None:
        self._is_on = self._managed("the profiler to start", _profiler.start, str(self._running.start.run_dir.path))

    def close(self) -> None:
        """Writes the profile that has begun, if any."""
        if self._is_on and self._managed("a profile to be written", _profiler.stop):
            say(
                f"Profiled: steps {self._first} to {min(self._last, self._running.tally.step)}, for `tensorboard "
                f"--logdir={self._running.start.run_dir.path}` with tensorboard-plugin-profile installed."
            )
        self._is_on = False

    def _managed(self, what: str, function: Callable, *args) -> bool:
        """Calls a function of the profiler, which the watchdog may have to wait for; returns whether that succeeded."""
        try:
            with self._running.tally.paused(), self._running.watchdog.doing(what):
                function(*args)
        except (tf.errors.OpError, OSError) as error:
            steps = ",".join(map(str, self._running.start.config.profile_steps))
            say(f"*** --profile_steps={steps}: no profile ({errors.reason(error)}). The run goes on.")
            return False
        return True
