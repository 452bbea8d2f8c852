"""The command as a user starts it, on few and small images, with real processes; all but one are forked."""

import json

import pytest
import sides

from tower_train import benchmark, errors

CEILING = "ceiling/float32 matrix product"  # imports TensorFlow itself
SIDES = ["port", "tower_train/2 towers/float32", CEILING]


def test_a_comparison_of_real_processes(cifar10_dir, tmp_path, capsys):
    with sides.forking(lambda words: "multiply" not in words[-1]):
        status = benchmark.main(
            ["benchmark", f"--systems={','.join(SIDES)}", "--rounds=2", "--seconds=0.1", "--batch_size=8",
             "--towers=1,2", "--device=cpu", "--dataset=cifar10", f"--data_dir={cifar10_dir}", f"--out={tmp_path}"]
        )  # fmt: skip
    assert status == 0 and "tower_train, 2 towers" in capsys.readouterr().out
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {row["side"]["name"]: row for row in written["parts"]["Training"]}
    assert list(rows) == SIDES
    for name, row in rows.items():
        assert 0.05 < row["first_step_secs"] < 300 and row["peak_bytes"] > 100 * 2**20
        assert list(row["rates"]) == ["0", "1"] and row["rate"]["low"] == min(row["rates"].values()) > 0
        # All of them wait much longer than they work; a tenth of a core would be a prefetching thread gone wild.
        assert row["idle_cpu_secs"] < 0.1 * row["idle_secs"], name
    examples = {name: row["examples_per_step"] for name, row in rows.items()}
    flops = examples.pop(CEILING) * 105_295_104
    assert flops == pytest.approx(2 * round((flops / 2) ** (1 / 3)) ** 3)  # a product of square matrices
    assert set(examples.values()) == {8}
    assert set(rows["port"]["ratio"].values()) == {1.0}
    assert rows[CEILING]["share"]["median"] == pytest.approx(1.0)
    assert 0 < rows["tower_train/2 towers/float32"]["share"]["median"] < 3


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="--out=.*/file/out cannot be made"):
        benchmark.main(["benchmark", f"--out={tmp_path / 'file' / 'out'}"])
