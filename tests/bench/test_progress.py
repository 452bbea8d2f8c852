"""The time left follows the clock, each kind of work by itself."""

import pytest

from tower_train.bench import progress
from tower_train.bench.progress import MEASURING, STARTING


class Clock:
    secs = 0.0

    def __call__(self):
        return self.secs


def test_what_took_long_will_take_long_again(capsys):
    """Starting takes three times what was estimated, measuring what was asked for."""
    clock = Clock()
    with progress.Progress(clock) as shown:
        shown.expect(STARTING, 40.0)
        shown.expect(MEASURING, 60.0)
        shown.announce("measuring")
        for left in (30 * 3 + 60, 20 * 3 + 60):
            with shown.work(STARTING, 10.0, "starting"):
                clock.secs += 30.0
            assert shown.left() == pytest.approx(left)
        shown.note("two are ready")
        with shown.work(MEASURING, 6.0, "round 1"):
            clock.secs += 6.0
        assert shown.left() == pytest.approx(20 * 3 + 54)
    assert capsys.readouterr().err.splitlines() == [
        "tower_train: measuring takes about 2 minutes",
        "tower_train: two are ready, about 2 minutes left",
    ]


@pytest.mark.parametrize(
    ("secs", "words"), [(0.4, "0 s"), (89.0, "89 s"), (100.0, "2 minutes"), (3000.0, "50 minutes")]
)
def test_durations_are_as_exact_as_estimates(secs, words):
    assert progress.duration(secs) == words
