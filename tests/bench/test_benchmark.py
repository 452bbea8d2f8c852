"""The command as a user starts it, on few and small images, with real processes; all but one are forked."""

import json
import re

import pytest
import sides

from tower_train import benchmark, errors
from tower_train.bench import results

CEILING = "ceiling/float32 matrix product"  # imports TensorFlow itself
SIDES = ["port", "tower_train/2 towers/float32/fixed", CEILING]
TITLES = [
    "Published script, ported",
    "tower_train, 2 towers, fixed batch, float32",
    "ceiling: matrix products, float32",
]


@pytest.fixture(scope="module")
def printed_and_out(cifar10_dir, tmp_path_factory):
    """The output of a benchmark of SIDES, and the directory of its results."""
    out, lines = tmp_path_factory.mktemp("out"), []
    with pytest.MonkeyPatch.context() as patch, sides.forking(lambda words: CEILING not in words[-1]):
        patch.setattr("builtins.print", lambda text="", **_: lines.append(text))
        patch.setattr(results, "too_noisy", lambda rows: None)  # samples are short, and other tests may run
        status = benchmark.main(
            ["benchmark", f"--systems={','.join(SIDES)}", "--rounds=2", "--seconds=0.1", "--batch_size=8",
             "--towers=1,2", "--device=cpu", "--dataset=cifar10", f"--data_dir={cifar10_dir}", f"--out={out}"]
        )  # fmt: skip
        printed = "\n".join(lines)
        lines.clear()
        assert status == benchmark.main(["benchmark", f"--redraw={out / 'benchmark.json'}"]) == 0
    assert printed.endswith("\n".join(lines)) and "| Published script, ported" in "\n".join(lines)
    return printed, out


@pytest.fixture(scope="module")
def written(printed_and_out):
    return json.loads((printed_and_out[1] / "benchmark.json").read_text())


def test_the_table_has_a_row_for_every_side(printed_and_out):
    rows = re.findall(r"^\| (\S.*?) +\|", printed_and_out[0], re.MULTILINE)
    assert rows[:1] + rows[2:] == ["system", *TITLES]


def test_every_start_and_every_sample_is_kept(written):
    assert [side["side"]["name"] for side in written["sides"]] == SIDES
    for side in written["sides"]:
        assert side["first_step_secs"] > side["import_secs"] > (0.1 if side["side"]["name"] == CEILING else 0)
        assert side["peak_bytes"] > 100 * 2**20
        assert [sample["round"] for sample in side["samples"]] == [0, 1]
        for sample in side["samples"]:
            assert sample["seconds"] >= 0.1
            assert sample["per_sec"] == pytest.approx(side["work_per_step"] * sample["steps"] / sample["seconds"])


def test_sides_that_are_not_measured_stand_still(written):
    """All of them wait much longer than they work; a tenth of a core would be a prefetching thread gone wild."""
    for side in written["sides"]:
        idle, cpu = (sum(sample[name] for sample in side["samples"]) for name in ("idle_secs", "idle_cpu_secs"))
        assert cpu < 0.1 * idle, side["side"]["name"]


def test_the_work_of_a_step_is_its_examples_or_its_operations(written):
    by_name = {side["side"]["name"]: side["work_per_step"] for side in written["sides"]}
    flops = by_name.pop(CEILING)
    assert flops == 2 * round((flops / 2) ** (1 / 3)) ** 3  # a product of square matrices
    assert set(by_name.values()) == {8}


def test_ratios_are_to_the_port_and_shares_of_the_ceiling(written):
    rows = {row["side"]["name"]: row for row in written["rows"]}
    assert set(rows["port"]["ratio"].values()) == {1.0}
    assert rows[CEILING]["share"]["median"] == pytest.approx(1.0)
    assert 0 < rows["tower_train/2 towers/float32/fixed"]["share"]["median"] < 3


def test_what_it_was_measured_on_is_kept(written):
    assert written["machine"]["cores"] >= 1
    assert {"python", "tensorflow", "keras", "numpy"} <= set(written["machine"]["versions"])
    assert written["about"]["flops_per_example"] == pytest.approx(105.3e6, rel=1e-3)
    assert written["options"]["batch_size"] == 8


def test_the_plot_is_written(printed_and_out):
    pytest.importorskip("matplotlib")
    assert (printed_and_out[1] / "benchmark.png").read_bytes().startswith(b"\x89PNG")


def test_how_long_it_takes_is_said_without_a_terminal(printed_and_out):
    notices = re.findall(r"^tower_train: (.*)", printed_and_out[0], re.MULTILINE)
    assert notices[0] == "looking at data and devices"
    assert re.fullmatch(r"measuring 3 systems in 2 rounds takes about \d+ (s|minutes)", notices[1])
    port, towers, ceiling = (f"{title} is ready" for title in TITLES)
    ends = [port, ceiling, towers, "round 1 is done", "round 2 is done"]  # first what others are compared with
    for end, notice in zip(ends, notices[2:], strict=True):
        assert re.fullmatch(rf"{re.escape(end)}, about \d+ (s|minutes) left", notice)
    assert notices[-1].endswith("about 0 s left")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="--out=.*/file/out cannot be made"):
        benchmark.main(["benchmark", f"--out={tmp_path / 'file' / 'out'}"])
