"""Ratios are taken within a round, and tables show them with medians and spreads."""

import numpy as np
import pytest

from tower_train.bench import report
from tower_train.bench.report import Measured, Row
from tower_train.bench.systems import System


def measured(name, per_sec, kind="rival", dtype="float32", peak_bytes=0):
    samples = [{"round": number, "per_sec": value} for number, value in enumerate(per_sec)]
    return Measured(System(name, kind, {}, 8, dtype), first_step_secs=1.5, peak_bytes=peak_bytes, samples=samples)


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds():
    """The machine gets ten times slower meanwhile: a ratio of medians would say something else."""
    base, other = [100.0, 50.0, 10.0], [110.0, 120.0, 20.0]
    row = report.rows([measured("port", base), measured("other", other)], "port", None)[1]
    assert row.ratio == np.median(np.divide(other, base)) == 2.0
    assert row.per_sec == 110.0


def test_rounds_that_the_reference_was_not_measured_in_are_left_out():
    assert report.median_ratio({0: 6.0, 1: 5.0, 2: 9.0}, {0: 2.0, 2: 1.0}) == 6.0
    assert report.median_ratio({0: 6.0}, {1: 2.0}) is None


def test_the_share_of_the_ceiling_is_of_the_same_arithmetic():
    """100 operations an example: ceilings of 1000 and 4000 a second are enough for 10 and 40 examples a second."""
    sides = [
        measured("single", [8.0, 9.0, 7.0]),
        measured("half", [8.0, 9.0, 7.0], dtype="bfloat16"),
        measured("ceiling/float32", [1000.0] * 3, kind="matmul"),
        measured("ceiling/bfloat16", [4000.0] * 3, kind="matmul", dtype="bfloat16"),
    ]
    rows = {row.name: row for row in report.rows(sides, None, flops_per_example=100.0)}
    assert rows["single"].share == pytest.approx(0.8)
    assert rows["half"].share == pytest.approx(0.2)
    assert rows["ceiling/bfloat16"].per_sec == 40.0
    assert rows["ceiling/bfloat16"].peak_bytes is None
    assert rows["single"].ratio is None


def test_several_gpus_are_held_against_as_many_ceilings():
    """Towers without a GPU of their own share what one ceiling is measured on."""
    towers = measured("two towers", [30.0])
    towers.side.settings["towers"] = 2
    replicas = measured("four replicas", [30.0])
    replicas.side.settings["num_devices"] = 4
    sides = [towers, replicas, measured("ceiling/float32", [2000.0], kind="matmul")]
    for on_gpus, expected in ((True, [0.75, 0.375, 1.0]), (False, [1.5, 1.5, 1.0])):
        assert [row.share for row in report.rows(sides, None, 100.0, on_gpus)] == expected


def test_without_a_count_of_the_arithmetic_there_are_no_ceilings():
    sides = [measured("single", [8.0]), measured("ceiling/float32", [1000.0], kind="matmul")]
    (row,) = report.rows(sides, "single", None)
    assert (row.name, row.ratio, row.share) == ("single", 1.0, None)


def test_a_table_is_markdown_with_aligned_columns():
    assert report.markdown(["side", "n"], [["a", "1"], ["longer", "23"]]) == [
        "| side   |  n |",
        "| ------ | -: |",
        "| a      |  1 |",
        "| longer | 23 |",
    ]


def test_a_row_has_its_median_spread_ratio_share_memory_and_start():
    rows = [
        Row("mine", 1000.4, 980.0, 1030.0, 1.554, 0.9, 700 * 2**20, 3.94),
        Row("ceiling", 1100.0, 1100.0, 1100.0, None, 1.0, None, None),
    ]
    _, _, mine, ceiling = report.comparison(rows, "port")
    assert mine.split() == "| mine | 1000 | +/- 25 | 1.55 | 0.90 | 700 MiB | 3.9 s |".split()
    assert ceiling.split() == "| ceiling | 1100 | +/- 0 | - | 1.00 | - | - |".split()


def test_the_memory_of_gpus_has_a_column_where_there_are_some():
    mine = measured("mine", [8.0], peak_bytes=2**20)
    mine.card_bytes = 5 * 2**20
    rows = report.rows([mine, measured("ceiling/float32", [1000.0], kind="matmul")], None, 100.0, on_gpus=True)
    head, _, first, ceiling = report.comparison(rows, None)
    assert head.split("|")[-2].strip() == "of a GPU's memory"
    assert [line.split("|")[-2].strip() for line in (first, ceiling)] == ["5 MiB", "-"]


def test_a_side_that_does_not_stand_still_is_warned_about():
    def idling(name, idle_cpu_secs):
        return Measured(
            System(name, "rival", {}, 8), samples=[{"per_sec": 1.0, "idle_secs": 10.0, "idle_cpu_secs": idle_cpu_secs}]
        )

    warnings = [line for line in report.notes([idling("still", 0.1), idling("busy", 3.0)], None) if "Warning" in line]
    assert warnings == ["Warning: busy used 30% of a core while others were measured."]
