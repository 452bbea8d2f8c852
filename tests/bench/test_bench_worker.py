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
    monkeypatch.setattr(worker.time, "process_time", lambda: clock.cpu)
    monkeypatch.setattr(worker, "WARM_UP_SECS", 0.0)

    class Requests(io.StringIO):
        def readline(self):
            clock.wall += WAIT_SECS
            return super().readline()

    def run(requests, warm_up_steps=10):
        said, done = [], 0

        class Channel(io.StringIO):
            def write(self, text):
                said.append((json.loads(text), done))

        lines = Requests("".join(json.dumps(request) + "\n" for request in requests))
        pacer = worker.Pacer(Channel(), lines, import_secs=2.0, work_per_step=128, warm_up_steps=warm_up_steps)
        while True:
            clock.wall += STEP_SECS
            clock.cpu += 1.5 * STEP_SECS
            done += 1
            if pacer.after_step():
                return said

    return run


def test_the_first_step_and_the_warm_up_are_told_apart(run_side):
    (first, after_first), (ready, after_warm_up), _ = run_side([])
    assert (first, after_first) == ({"event": "first_step", "import_secs": 2.0}, 1)
    assert (ready["event"], ready["work_per_step"], after_warm_up) == ("ready", 128, 11)
    assert ready["peak_bytes"] > 10 * 2**20


def test_a_long_warm_up_gives_signs_of_life(run_side):
    said = [(said["event"], done) for said, done in run_side([], warm_up_steps=2500)]
    assert said[:4] == [("first_step", 1), ("warming_up", 1001), ("warming_up", 2001), ("ready", 2501)]


def test_a_measurement_is_led_in_by_steps_that_do_not_count(run_side):
    _, (_, before), (measured, after), (stopped, _) = run_side([{"steps": 7}])
    assert measured["steps"] == 7
    assert after - before == 7 + worker.LEAD_IN_STEPS
    assert stopped["event"] == "stopped"


def test_a_measurement_lasts_as_long_as_asked_for(run_side):
    *_, (measured, _), _ = run_side([{"seconds": 0.195}])
    assert measured["steps"] == 20
    assert measured["seconds"] == pytest.approx(20 * STEP_SECS)


def test_each_step_is_told_by_its_number_if_asked_for(run_side):
    _, (ready, before), (measured, after), _ = run_side([{"steps": 7, "each": True}])
    assert measured["first"] == before + worker.LEAD_IN_STEPS + 1 == after - 6
    assert measured["step_secs"] == pytest.approx([STEP_SECS] * 7)


def test_neither_waiting_nor_leading_in_counts_as_measured_time(run_side):
    *_, (one, _), (other, _), _ = run_side([{"steps": 10}, {"steps": 30}])
    assert one["seconds"] == pytest.approx(10 * STEP_SECS)
    assert other["seconds"] == pytest.approx(30 * STEP_SECS)


def test_processor_time_used_while_standing_still_is_told(run_side):
    *_, (measured, _), _ = run_side([{"steps": 10}])
    assert measured["idle_secs"] == pytest.approx(WAIT_SECS)
    assert measured["idle_cpu_secs"] == 0.0


def test_the_end_of_the_benchmark_ends_the_side(run_side):
    assert [said["event"] for said, _ in run_side([])] == ["first_step", "ready", "stopped"]
    assert [said["event"] for said, _ in run_side([{}])] == ["first_step", "ready", "stopped"]
