"""Ratios are taken within a round, and tables show them with medians and ranges."""

import numpy as np
import pytest

from tower_train.bench import report, results
from tower_train.bench.results import Figure, Result
from tower_train.bench.sides import Side


def result(name, rates, train="module:train", dtype="float32", num_devices=1, **more):
    return Result(
        Side(name, train, {}, num_devices, dtype, label=more.pop("label", "")), dict(enumerate(rates)), **more
    )


def ceiling(rates, dtype="float32"):
    return result(f"ceiling/{dtype}", rates, "module:multiply", dtype)


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds():
    """The machine gets ten times slower meanwhile: a ratio of medians would say something else."""
    base, other = [100.0, 50.0, 10.0], [110.0, 120.0, 20.0]
    first, second = results.compare([result("port", base), result("other", other)])
    assert second.ratio == Figure(np.median(np.divide(other, base)), 1.1, 2.4) and second.ratio.median == 2.0
    assert second.rate == Figure(110.0, 20.0, 120.0)
    assert first.ratio == Figure(1.0, 1.0, 1.0)


def test_the_share_of_the_ceiling_is_of_the_same_arithmetic():
    sides = [result("single", [8.0, 9.0, 7.0]), result("half", [8.0, 9.0, 7.0], dtype="bfloat16"),
             ceiling([10.0] * 3), ceiling([40.0] * 3, "bfloat16")]  # fmt: skip
    rows = {row.side.name: row for row in results.compare(sides)}
    assert (rows["single"].share.median, rows["single"].ceiling) == pytest.approx((0.8, 10.0))
    assert (rows["half"].share.median, rows["half"].ceiling) == pytest.approx((0.2, 40.0))
    assert results.compare([result("single", [8.0])])[0].share is None


@pytest.mark.parametrize(("on_gpus", "expected"), [(True, [0.75, 0.375, 1.0]), (False, [1.5, 1.5, 1.0])])
def test_several_gpus_are_held_against_as_many_ceilings(on_gpus, expected):
    """Towers without a GPU of their own share what one ceiling is measured on."""
    sides = [result("2 towers", [30.0], num_devices=2), result("4 replicas", [30.0], num_devices=4), ceiling([20.0])]
    assert [row.share.median for row in results.compare(sides, on_gpus)] == expected


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_row_has_its_medians_ranges_share_memory_and_start():
    mine = result("mine", [980.0, 1000.4, 1030.0], label="Mine", peak_bytes=700 * 2**20, first_step_secs=3.94)
    head, _, first, last = map(cells, report.table("Training", results.compare([mine, ceiling([2000.0] * 3)])))
    assert head[:2] == ["Training", "examples/sec"]
    assert first == ["Mine", "1000", "980 to 1030", "1.00", "1.00 to 1.00", "0.50", "700 MiB", "3.9 s"]
    assert last == ["ceiling/float32", "2000", "2000 to 2000", "2.00", "1.94 to 2.04", "1.00", "-", "-"]


def test_a_side_that_does_not_stand_still_is_warned_about():
    sides = [result(name, [1.0], idle_secs=10.0, idle_cpu_secs=secs) for name, secs in (("still", 0.1), ("busy", 3.0))]
    warnings = [line for line in report.notes(results.compare(sides), None) if "Warning" in line]
    assert warnings == ["Warning: busy used 30% of a core while others were measured."]
