"""The command as a user starts it, on few and small images, with real processes; all but one are forked."""

import json

import pytest
import sides

from tower_train import benchmark, errors

CEILING = "ceiling/float32 matrix product"  # imports TensorFlow itself
SIDES = ["port", "tower_train/2 towers/float32", CEILING]


@pytest.fixture(scope="module")
def printed_and_out(cifar10_dir, tmp_path_factory):
    """The output of a benchmark of SIDES, and the directory of its results."""
    out, lines = tmp_path_factory.mktemp("out"), []
    with pytest.MonkeyPatch.context() as patch, sides.forking(lambda words: "multiply" not in words[-1]):
        patch.setattr("builtins.print", lambda text="", **_: lines.append(text))
        status = benchmark.main(
            ["benchmark", f"--systems={','.join(SIDES)}", "--rounds=2", "--seconds=0.1", "--batch_size=8",
             "--towers=1,2", "--device=cpu", "--dataset=cifar10", f"--data_dir={cifar10_dir}", f"--out={out}"]
        )  # fmt: skip
    assert status == 0
    return "\n".join(lines), out


@pytest.fixture(scope="module")
def written(printed_and_out):
    return json.loads((printed_and_out[1] / "benchmark.json").read_text())


@pytest.fixture(scope="module")
def rows(written):
    """{name: row}"""
    return {row["side"]["name"]: row for row in written["parts"]["Training"]}


def test_every_start_and_every_round_is_kept(rows):
    assert list(rows) == SIDES
    for row in rows.values():
        assert 0.05 < row["first_step_secs"] < 300 and row["peak_bytes"] > 100 * 2**20
        assert list(row["rates"]) == ["0", "1"]
        assert row["rate"]["low"] == min(row["rates"].values()) > 0


def test_sides_that_are_not_measured_stand_still(rows):
    """All of them wait much longer than they work; a tenth of a core would be a prefetching thread gone wild."""
    for name, row in rows.items():
        assert row["idle_cpu_secs"] < 0.1 * row["idle_secs"], name


def test_the_work_of_a_step_is_its_examples_or_its_operations(rows):
    by_name = {name: row["examples_per_step"] for name, row in rows.items()}
    flops = by_name.pop(CEILING) * 105_295_104
    assert flops == pytest.approx(2 * round((flops / 2) ** (1 / 3)) ** 3)  # a product of square matrices
    assert set(by_name.values()) == {8}


def test_ratios_are_to_the_port_and_shares_of_the_ceiling(rows):
    assert set(rows["port"]["ratio"].values()) == {1.0}
    assert rows[CEILING]["share"]["median"] == pytest.approx(1.0)
    assert 0 < rows["tower_train/2 towers/float32"]["share"]["median"] < 3


def test_the_plot_is_written(printed_and_out):
    pytest.importorskip("matplotlib")
    assert (printed_and_out[1] / "benchmark.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="--out=.*/file/out cannot be made"):
        benchmark.main(["benchmark", f"--out={tmp_path / 'file' / 'out'}"])
