"""Reports how long the benchmark takes, and while it runs how much of that is left. No TensorFlow here."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tower_train import console

STARTING, MEASURING = "starting", "measuring"  # kinds of work, with different errors of their estimates
START_SECS, STEP_SECS = 8.0, 0.01  # about a side's start, and a step of a long warm-up; corrected by the clock


class Progress:
    """Progress on standard error, apart from the tables: a bar on a terminal, otherwise lines.

    Work is expected in estimated seconds; the clock corrects estimates of the same kind. Use as a context manager.

    Args:
      clock: returns the time in seconds.
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
        """Reports how long all expected work takes."""
        console.notice(f"{what} takes about {duration(self.left())}")

    def note(self, what: str) -> None:
        """Reports what is done, and the time left; on a terminal the bar does."""
        if not self._has_bar:
            console.notice(f"{what}, about {duration(self.left())} left")

    @contextlib.contextmanager
    def work(self, kind: str, secs: float, doing: str) -> Iterator[None]:
        """Counts the block as work of so many estimated seconds."""
        self._bar.update(doing=doing)
        begin = self._clock()
        yield
        self._done[kind] += secs
        self._taken[kind] += self._clock() - begin
        taken, left = sum(self._taken.values()), self.left()
        self._bar.update(completed=taken / max(taken + left, 1e-9), left=f"about {duration(left)} left")

    def left(self) -> float:
        """Returns the seconds left: each kind's estimates, corrected by the clock."""
        total = 0.0
        for kind, expected in self._expected.items():
            worth = self._taken[kind] / self._done[kind] if self._done[kind] else 1.0
            total += worth * max(expected - self._done[kind], 0.0)
        return total


def duration(secs: float) -> str:
    """Puts seconds into words, with the precision of an estimate."""
    return f"{secs:.0f} s" if secs < 90 else f"{secs / 60:.0f} minutes"
