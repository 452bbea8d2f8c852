"""Says how long the benchmark takes, and while it runs how much of that is left. No TensorFlow here."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tower_train import console

STARTING, MEASURING = "starting", "measuring"  # the kinds of work, whose estimates are wrong in different ways
START_SECS, STEP_SECS = 8.0, 0.01  # about what starting a side takes, and a step of a long warm-up; corrected by clock


class Progress:
    """Progress on standard error, where it does not get into the tables: a bar on a terminal, otherwise lines.

    Work is expected in estimated seconds. What it takes by the clock corrects the estimates of the same kind. Use as a
    context manager.

    Args:
      clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._has_bar = clock, sys.stderr.isatty()
        self._expected = dict.fromkeys((STARTING, MEASURING), 0.0)
        self._done, self._taken = dict(self._expected), dict(self._expected)
        self._bar = console.ProgressBar(
            lambda progress: (
                progress.TextColumn("{task.percentage:>3.0f} %"), progress.BarColumn(), progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[left]}"), progress.TextColumn("{task.fields[doing]}"),
            ),
            total=1.0, stream=sys.stderr, doing="", left="",
        )  # fmt: skip

    def __enter__(self):
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        self._bar.__exit__(*error)

    def expect(self, kind: str, secs: float) -> None:
        """Adds work of so many estimated seconds."""
        self._expected[kind] += secs

    def announce(self, what: str) -> None:
        """Says how long everything that is expected takes."""
        console.notice(f"{what} takes about {duration(self.left())}")

    def note(self, what: str) -> None:
        """Says what is done, and how much time is left; on a terminal the bar does."""
        if not self._has_bar:
            console.notice(f"{what}, about {duration(self.left())} left")

    @contextlib.contextmanager
    def work(self, kind: str, secs: float, doing: str) -> Iterator[None]:
        """Counts what is done in the block as work of so many estimated seconds."""
        self._bar.update(doing=doing)
        begin = self._clock()
        yield
        self._done[kind] += secs
        self._taken[kind] += self._clock() - begin
        taken, left = sum(self._taken.values()), self.left()
        self._bar.update(completed=taken / max(taken + left, 1e-9), left=f"about {duration(left)} left")

    def left(self) -> float:
        """The seconds left: each kind's estimates times what those of its kind have turned out to be worth."""
        total = 0.0
        for kind, expected in self._expected.items():
            worth = self._taken[kind] / self._done[kind] if self._done[kind] else 1.0
            total += worth * max(expected - self._done[kind], 0.0)
        return total


def duration(secs: float) -> str:
    """Seconds in words, as exact as an estimate is."""
    return f"{secs:.0f} s" if secs < 90 else f"{secs / 60:.0f} minutes"
