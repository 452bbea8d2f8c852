"""What people read."""

from tower_train.bench import attribution, table
from tower_train.bench.attribution import Breakdown
from tower_train.bench.results import Row
from tower_train.bench.rounds import Measured
from tower_train.bench.systems import System


def test_a_table_is_markdown_with_aligned_columns():
    assert table.markdown(["side", "n"], [["a", "1"], ["longer", "23"]]) == [
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
    _, _, mine, ceiling = table.comparison(rows, "port")
    assert mine.split() == "| mine | 1000 | +/- 25 | 1.55 | 0.90 | 700 MiB | 3.9 s |".split()
    assert ceiling.split() == "| ceiling | 1100 | +/- 0 | - | 1.00 | - | - |".split()


def test_a_side_that_does_not_stand_still_is_warned_about():
    def measured(name, idle_cpu_secs):
        return Measured(
            System(name, "rival", {}, 8), samples=[{"per_sec": 1.0, "idle_secs": 10.0, "idle_cpu_secs": idle_cpu_secs}]
        )

    warnings = [
        line for line in table.notes([measured("still", 0.1), measured("busy", 3.0)], None) if "Warning" in line
    ]
    assert warnings == ["Warning: busy used 30% of a core while others were measured."]


def test_a_breakdown_has_a_row_for_every_tower_and_a_column_for_every_count():
    one = Breakdown(1, False, 0.011, 2, 0.9, 0.8, {"tower 0": 0.008, attribution.UPDATE: 0.002}, 0, 0.0)
    two = Breakdown(2, False, 0.009, 2, 1.0, 0.8, {"tower 0": 0.004, "tower 1": 0.004}, 1, 0.0)
    lines = {line.split("|")[1].strip(): line.split("|")[2:4] for line in table.breakdown([one, two])}
    found = {name: [" ".join(cell.split()) for cell in cells] for name, cells in lines.items()}
    assert found[""] == ["1 tower", "2 towers"]
    assert found["tower 0"] == ["8.0 ms 80%", "4.0 ms 50%"]
    assert found["tower 1"] == ["", "4.0 ms 50%"]
    assert found["update"] == ["2.0 ms 20%", "0.0 ms 0%"]
    assert found["a step, without tracing"] == ["11.0 ms", "9.0 ms"]
    assert found["cores busy meanwhile"] == ["90% of 2", "100% of 2"]
