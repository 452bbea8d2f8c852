"""Ratios are taken within a round, and tables show them with medians and spreads."""

import numpy as np
import pytest

from tower_train import errors
from tower_train.bench import report, results
from tower_train.bench.results import Measured, Ratio, Row
from tower_train.bench.systems import System

STILL = {"per_sec": 1.0, "idle_secs": 10.0, "idle_cpu_secs": 0.0}


def measured(name, per_sec, kind="rival", dtype="float32", peak_bytes=0):
    samples = [{"round": number, "per_sec": value} for number, value in enumerate(per_sec)]
    return Measured(System(name, kind, {}, 8, dtype), first_step_secs=1.5, peak_bytes=peak_bytes, samples=samples)


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds():
    """The machine gets ten times slower meanwhile: a ratio of medians would say something else."""
    base, other = [100.0, 50.0, 10.0], [110.0, 120.0, 20.0]
    row = results.rows([measured("port", base), measured("other", other)], "port", None)[1]
    assert row.ratio.median == np.median(np.divide(other, base)) == 2.0
    assert (row.ratio.low, row.ratio.high) == (1.1, 2.4)
    assert row.ratio.of_medians == np.median(other) / np.median(base) == 2.2
    assert row.per_sec == 110.0


def test_rounds_that_the_reference_was_not_measured_in_are_left_out():
    assert results.ratio({0: 6.0, 1: 5.0, 2: 9.0}, {0: 2.0, 2: 1.0}) == Ratio(6.0, 3.0, 9.0, of_medians=4.0)
    assert results.ratio({0: 6.0}, {1: 2.0}) is None


@pytest.mark.parametrize(
    ("ratio", "noisy"),
    [
        (Ratio(1.2, 1.0, 1.5, 1.2), False),
        (Ratio(1.2, 1.0, 1.51, 1.2), True),
        (Ratio(1.24, 1.0, 1.3, 469 / 423), True),  # it would stand beside rates that say something else
        (Ratio(1.2, 1.1, 1.3, 1.1), False),
    ],
)
def test_a_ratio_is_too_noisy_if_it_spans_much_or_contradicts_the_rates(ratio, noisy):
    assert ratio.is_noisy == noisy


def test_rows_are_not_believed_if_most_of_their_ratios_are_too_noisy():
    def reason(*others):
        sides = [measured("port", [100.0, 100.0, 100.0]), *(measured(str(i), o) for i, o in enumerate(others))]
        return results.too_noisy(results.rows(sides, "port", None))

    calm, wild = [100.0, 101.0, 102.0], [100.0, 160.0, 130.0]
    assert reason() is None
    assert reason(calm, wild) is None
    assert "2 of 3 ratios between systems span more than a factor of 1.5 over" in reason(calm, wild, wild)


def test_of_one_round_nothing_is_known_to_be_noisy():
    assert results.too_noisy(results.rows([measured("port", [1.0]), measured("other", [9.0])], "port", None)) is None


def test_the_share_of_the_ceiling_is_of_the_same_arithmetic():
    """100 operations an example: ceilings of 1000 and 4000 a second are enough for 10 and 40 examples a second."""
    sides = [
        measured("single", [8.0, 9.0, 7.0]),
        measured("half", [8.0, 9.0, 7.0], dtype="bfloat16"),
        measured("ceiling/float32", [1000.0] * 3, kind="matmul"),
        measured("ceiling/bfloat16", [4000.0] * 3, kind="matmul", dtype="bfloat16"),
    ]
    rows = {row.side.name: row for row in results.rows(sides, None, flops_per_example=100.0)}
    assert (rows["single"].share.median, rows["single"].ceiling) == pytest.approx((0.8, 10.0))
    assert (rows["half"].share.median, rows["half"].ceiling) == pytest.approx((0.2, 40.0))
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
        assert [row.share.median for row in results.rows(sides, None, 100.0, on_gpus)] == expected


def test_without_a_count_of_the_arithmetic_there_are_no_ceilings():
    sides = [measured("single", [8.0]), measured("ceiling/float32", [1000.0], kind="matmul")]
    (row,) = results.rows(sides, "single", None)
    assert (row.side.name, row.ratio, row.share) == ("single", Ratio(1.0, 1.0, 1.0, 1.0), None)


def test_a_table_is_markdown_with_aligned_columns():
    assert report.markdown(["side", "n"], [["a", "1"], ["longer", "23"]]) == [
        "| side   |  n |",
        "| ------ | -: |",
        "| a      |  1 |",
        "| longer | 23 |",
    ]


def test_a_row_has_its_median_spread_ratio_range_share_memory_and_start():
    side = System("mine", "rival", {}, 8, label="Mine, as I call it")
    ratio, wild = Ratio(1.554, 1.5, 1.6, 1.55), Ratio(0.9, 0.5, 1.2, 0.9)
    rows = [
        Row(side, 1000.4, 980.0, 1030.0, ratio, wild, 1100.0, 700 * 2**20, 3.94),
        Row(System("ceiling", "matmul", {}, None), 1100.0, 1100.0, 1100.0, None, Ratio(1.0, 1.0, 1.0, 1.0)),
    ]
    mine, ceiling = ([cell.strip() for cell in line.split("|")[1:-1]] for line in report.table(rows)[2:])
    assert mine == [
        "Mine, as I call it", "1000", "+/- 25", "1.55", "1.50 to 1.60", "too noisy", "700 MiB", "3.9 s"
    ]  # fmt: skip
    assert ceiling == ["ceiling", "1100", "+/- 0", "-", "-", "1.00", "-", "-"]


def test_the_memory_of_gpus_has_a_column_where_there_are_some():
    mine = measured("mine", [8.0], peak_bytes=2**20)
    mine.card_bytes = 5 * 2**20
    rows = results.rows([mine, measured("ceiling/float32", [1000.0], kind="matmul")], None, 100.0, on_gpus=True)
    head, _, first, ceiling = report.table(rows)
    assert head.split("|")[-2].strip() == "of a GPU's memory"
    assert [line.split("|")[-2].strip() for line in (first, ceiling)] == ["5 MiB", "-"]


def test_a_side_that_does_not_stand_still_is_warned_about():
    def idling(name, idle_cpu_secs):
        return Measured(
            System(name, "rival", {}, 8), samples=[{"per_sec": 1.0, "idle_secs": 10.0, "idle_cpu_secs": idle_cpu_secs}]
        )

    warnings = [
        line for line in report.notes([idling("still", 0.1), idling("busy", 3.0)], None, "port") if "Warning" in line
    ]
    assert warnings == ["Warning: busy used 30% of a core while others were measured."]


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"sides": [{"side": {}}]}', "[]"])
def test_what_holds_no_results_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "sweep.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        errors.ConfigError, match=r"sweep.json (cannot be read|holds no results).* Give a bench"
    ) as error:
        results.read(path)
    assert "\n" not in str(error.value)
