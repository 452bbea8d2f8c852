"""The plan's numbers against its formulas by hand."""

import jobs
import pytest

from tower_train import errors, plan
from tower_train.config import PlanOptions

OPTIONS = PlanOptions(
    params=1e6, flops=1e9, batch_size=100, towers=4, tower_flops=1e12, link=1e9, host_memory=1e10, bandwidth=1e8,
    latency=1e-3, launch=5e-4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "towers", "workers", "local_secs", "ring_secs"),
    [
        ("cpu", 1, 1, 0.008 + 0.0008, 0),  # 4 MB there and back at 1 GB/s; read twice at 10 GB/s
        ("cpu", 4, 1, 0.008 + 0.002, 0),
        ("mirrored", 1, 1, 0, 0),
        ("mirrored", 4, 1, 0.0005 + 0.006, 0),  # begun; 2 * 3/4 of 4 MB at 1 GB/s
        ("mirrored", 4, 2, 0.0065, 0.04 + 0.002),  # 4 MB at 100 MB/s; 2 messages
        ("cpu", 1, 4, 0.0088, 0.06 + 0.006),
    ],
)
def test_a_step_takes_what_its_messages_take(mode, towers, workers, local_secs, ring_secs):
    step = plan.step(OPTIONS, mode, towers, workers)
    assert step.compute_secs == pytest.approx(0.1)  # 100 examples of 1e9 operations at 1e12 a second
    assert (step.local_secs, step.ring_secs) == pytest.approx((local_secs, ring_secs))
    assert step.efficiency == pytest.approx(0.1 / (0.1 + local_secs + ring_secs))
    assert step.ring_bytes == pytest.approx(2 * (workers - 1) / workers * 4e6)


def test_the_command_tabulates_up_to_1024_towers_and_names_the_better_mode():
    process = jobs.command("tower_train.plan", "--params=25.6e6", "--flops=12e9", "--towers=8", "--workers=128")
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.splitlines()[2:]]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(2**i, max(1, 2**i // 8)) for i in range(11)]
    assert {row[-1] for row in rows} == {"mirrored"}
    assert "Computed, not measured" in process.stdout


def test_the_least_and_the_most_that_may_be_asked_are_tabulated():
    extremes = dict(flops=1, tower_flops=1.7e308, params=1, link=1, host_memory=1, bandwidth=1)
    for options in (extremes, dict(flops=1.7e308, params=1.7e308), {"latency": 1.7e308}):
        assert len(plan.table(PlanOptions(**options))) == 12
    with pytest.raises(errors.ConfigError, match="--flops=1e-320: it must be a number at least 1"):
        PlanOptions(flops=1e-320)


def test_half_the_bytes_in_bfloat16():
    options = PlanOptions(params=1e6, all_reduce_dtype="bfloat16")
    assert plan.step(options, "mirrored", 1, 2).ring_bytes == 2e6
