"""--profile_steps: a profile of some steps, for TensorBoard's profile plugin."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.console import say
from tower_train.run.actions import Action, Running

_profiler = tf.profiler.experimental


class Profiler(Action):
    """Profiles some steps, as far as this start does them, and marks their beginnings and ends.

    A profile that fails costs the run only a line on standard output.
    """

    def __init__(self, running: Running):
        self._running, self._train_dir = running, str(running.start.run_dir.path)
        self._first, self._last = running.start.config.profile_steps or (0, 0)
        self._profiled: list[int] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Marks a step, done within this block, in the profile; begins the profile with the first of them."""
        if not self._first <= step <= self._last:
            yield
            return
        if not self._profiled and not self._managed("the profiler to start", _profiler.start, self._train_dir):
            self._last = 0  # it is not tried again
            yield
            return
        self._profiled.append(step)
        with _profiler.Trace("train", step_num=step, _r=1):
            yield

    def is_due(self, step):
        return step == self._last

    def __call__(self, step, report):
        self.close()

    def close(self) -> None:
        """Writes the profile that has begun, if any."""
        profiled, self._profiled = self._profiled, []
        if profiled and self._managed("a profile to be written", _profiler.stop):
            say(f"Profiled: steps {profiled[0]} to {profiled[-1]}, for `tensorboard --logdir={self._train_dir}` with "
                "tensorboard-plugin-profile installed.")  # fmt: skip

    def _managed(self, what: str, function: Callable, *args) -> bool:
        """Calls a function of the profiler, which the watchdog may have to wait for; returns whether that succeeded."""
        try:
            with self._running.clock.stopped(), self._running.watchdog.doing(what):
                function(*args)
        except (tf.errors.OpError, OSError) as error:
            steps = ",".join(map(str, self._running.start.config.profile_steps))
            say(f"*** --profile_steps={steps}: no profile ({errors.reason(error)}). The run goes on.")
            return False
        return True
