"""A side does steps while it is measured, and stands still in between."""

import io
import json
import types

import pytest

from tower_train.bench import worker

STEP_SECS, WAIT_SECS = 0.01, 100.0


@pytest.fixture
def run_side(monkeypatch):
    """(requests) -> what the worker said, and how many steps were done when it said each.

    By the clock a step takes 10 ms of time and 15 ms of processor time, and a request is waited for 100 s.
    """
    clock = types.SimpleNamespace(wall=50.0, cpu=20.0)
    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock.wall)
    monkeypatch.setattr(worker.time, "time", lambda: 1000.0 + clock.wall)
    monkeypatch.setattr(worker.time, "process_time", lambda: clock.cpu)
    monkeypatch.setattr(worker, "WARM_UP_SECS", 0.0)

    class Requests(io.StringIO):
        def readline(self):
            clock.wall += WAIT_SECS
            return super().readline()

    def run(*seconds):
        said, done = [], 0

        class Channel(io.StringIO):
            def write(self, text):
                said.append((json.loads(text), done))

        lines = Requests("".join(f"{secs}\n" for secs in seconds))
        after_step = worker.Pacer(Channel(), lines, started=1048.0, batch_size=128)
        while True:
            clock.wall += STEP_SECS
            clock.cpu += 1.5 * STEP_SECS
            done += 1
            if after_step(0.5):
                return said

    return run


def test_it_is_ready_after_the_warm_up_and_knows_when_the_first_step_was_done(run_side):
    (ready, after_warm_up), _ = run_side()
    assert ready["first_step_secs"] == pytest.approx(2.0 + STEP_SECS)
    assert (ready["examples_per_step"], after_warm_up) == (128, 1 + worker.WARM_UP_STEPS)
    assert ready["peak_bytes"] > 10 * 2**20


def test_a_measurement_lasts_as_long_as_asked_for_and_is_led_in_by_steps_that_do_not_count(run_side):
    (_, before), (measured, after), (peaks, _) = run_side(0.195)
    assert measured["steps"] == 20 == after - before - worker.LEAD_IN_STEPS
    assert measured["seconds"] == pytest.approx(20 * STEP_SECS)
    assert peaks.keys() == {"peak_bytes", "card_bytes"}
