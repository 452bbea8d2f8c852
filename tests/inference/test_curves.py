"""The history of runs: in Result.history, in a table and in a figure."""

import json
import re

import jobs
import pytest

from tower_train.inference import curves


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of 20 steps with other rates, the first of which was stopped in between; and the last one's result."""
    root = tmp_path_factory.mktemp("runs")
    options = dict(eval_every_steps=10, validation_fraction=0.2)
    jobs.train_toy(root / "slow", max_steps=10, **options)
    jobs.train_toy(root / "slow", max_steps=20, **options)
    result = jobs.train_toy(root / "fast", max_steps=20, learning_rate=0.1, **options)
    return root / "slow", root / "fast", result


def test_the_history_has_the_names_of_keras_and_all_starts(runs):
    history = curves.history(str(runs[0]))
    assert history["step"] == [5, 10, 15, 20] and history["val_step"] == [10, 20]
    assert history["epoch"] == pytest.approx([step * 16 / 77 for step in history["step"]])
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10, 10, 15, 20, 20]
    evaluated = jobs.read_json(runs[0], "result.json")
    for split, prefix in (("validation", "val_"), ("train_evaluation", "train_")):
        for name in ("precision @ 1", "loss"):
            assert history[prefix + name][-1] == evaluated[split]["metrics"][name]["mean"]
    assert runs[2].history == curves.history(str(runs[1]))


def test_runs_are_drawn_and_tabulated_by_the_option_in_which_they_differ(runs, tmp_path):
    process = jobs.command("tower_train.curves", f"--out={tmp_path}/both", str(runs[0]), str(runs[1]))
    assert (process.returncode, process.stderr) == (0, "")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    texts = set(re.findall(r">([^<>]*)</text>", (tmp_path / "both.svg").read_text()))
    for rate in ("0.01", "0.1"):
        assert {f"learning_rate={rate}, training", f"learning_rate={rate}, evaluation"} <= texts
    assert {"loss", "precision @ 1", "epochs"} <= texts
    losses = [record["loss"] for record in jobs.metrics(runs[1])]
    line = f"loss +{losses[-1]:.4g} +{min(losses):.4g} +{max(losses):.4g}\n"
    assert re.search(line, process.stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No run is named"),
        (["nowhere"], "nowhere/metrics.jsonl cannot be read"),
        (["--out=no/x", "RUN"], "--out=no/x"),
    ],
)
def test_mistakes_end_in_a_line(runs, words, message, tmp_path):
    words = [str(runs[0]) if word == "RUN" else word for word in words]
    process = jobs.command("tower_train.curves", *words, cwd=tmp_path)
    assert process.returncode == 2 and re.fullmatch(f"[^\\n]*{message}[^\\n]*\\n", process.stderr)


def test_a_notebook_has_the_figure_and_no_lines_of_tensorflows_own():
    """Keras lists the devices upon its first array, which TensorFlow remarks on."""
    source = (
        "import sys; sys.modules['ipykernel'] = sys; import tower_train, keras; keras.ops.ones(2);"
        "from matplotlib.figure import Figure; from tower_train.inference import curves;"
        "sys.exit(curves._png(Figure())[:4] != b'\\x89PNG')"
    )
    found = jobs.command("-c", source)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
