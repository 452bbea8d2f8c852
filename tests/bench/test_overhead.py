"""The costs of reports, of the check of each step and of the start, from steps whose times are made up."""

import json

import numpy as np
import pytest

from tower_train.bench import measure, overhead, progress
from tower_train.bench.systems import REPORT_STEPS, BenchmarkOptions

COSTS = dict(log_every_steps=0.02, summary_every_steps=0.5, save_every_steps=1.5)  # of a report, in steps
SHARES = {"log lines": 0.002, "summaries": 0.005, "checkpoints": 0.006}  # every 10, 100 and 250 steps


def step_secs(first, count, noise=0.0, seed=0):
    """The seconds of steps that take 10 ms, then 20 ms, and longer where there are reports."""
    numbers = np.arange(first, first + count)
    secs = np.where(numbers < first + count // 2, 0.010, 0.020)
    steps = 1 + noise * np.random.default_rng(seed).normal(size=count)
    for kind, cost in COSTS.items():
        steps += cost * (numbers % REPORT_STEPS[kind] == 0)
    secs = secs * steps
    return secs.tolist()


def test_steps_without_noise_give_each_cost_to_the_bit():
    extra = overhead.extra_steps([(first, step_secs(first, 360)) for first in (7, 372)])
    found = overhead.costs_of_reports(extra, overhead.DEFAULTS)
    assert {name: cost.median for name, cost in found.items()} == pytest.approx(SHARES | {"all of these": 0.013})
    assert [len(costs) for costs in extra] == [93, 12, 12]


def test_the_true_cost_lies_between_the_bounds_in_95_of_100_measurements():
    """Steps vary by 10 %, ten times what the reports cost."""
    inside, widths = 0, []
    for seed in range(40):
        samples = [(7 + 365 * i, step_secs(7 + 365 * i, 360, 0.1, 40 * seed + i)) for i in range(5)]
        cost = overhead.costs_of_reports(overhead.extra_steps(samples), overhead.DEFAULTS)["all of these"]
        inside += cost.low <= 0.013 <= cost.high
        widths.append(cost.high - cost.low)
    assert inside >= 34  # 38 of 40 are expected
    assert np.mean(widths) < 0.01  # half a percent to both sides


def test_the_check_costs_what_lies_between_neighbours():
    cost = overhead.median_cost([0.01, 0.5, 0.01, -0.3, 0.01, 0.02, 0.0])
    assert (cost.median, cost.low <= 0.01 <= cost.high) == (0.01, True)


def test_the_form_shows_every_cost_and_the_start(fake_workers, tmp_path, monkeypatch):
    """The machine halves its speed for a while, which nothing here is to blame for; the check costs 1 %, and the first
    step comes 3 s after the start."""
    workers = fake_workers(
        steps_per_sec=lambda name, number: (100 - 50 * (number % 2)) * (1.01 if "unguarded" in name else 1)
    )
    workers.step_secs = step_secs
    monkeypatch.setattr(overhead, "import_secs", lambda: 2.0)
    about = {"gpus": [], "data": "images", "notice": None}
    machine = {"processor": "abacus", "cores": 2, "memory_bytes": 2**30, "versions": {"python": "3"}}
    options = BenchmarkOptions(overhead=True, rounds=2, towers=(1, 8))
    lines = overhead.overhead(measure.Session(options, tmp_path, machine, about, workers.start, progress.Progress()))
    rows = {row[1]: row[2:-1] for row in ([cell.strip() for cell in line.split("|")] for line in lines) if len(row) > 2}
    assert {name: rows[name][0] for name in SHARES} == {name: f"{share:.2%}" for name, share in SHARES.items()}
    assert rows["all of these"][0] == "1.30%"
    assert rows["the check that each step is finite"] == ["1.00%"] * 3
    for towers in ("1 tower", "8 towers"):
        assert any(
            f"first step of {towers}: 3.0 s after the start of the process, 1.50 (1.50 to" in line for line in lines
        )
    written = json.loads((tmp_path / "overhead.json").read_text())
    assert written["starts"]["8 towers"] == [{"import_secs": 2.0, "first_step_secs": 3.0}] * 2
