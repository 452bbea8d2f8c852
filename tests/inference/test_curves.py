"""The history of runs: in Result.history, in a table and in a figure."""

import importlib
import json
import os
import re
import shutil

import jobs
import pytest
from matplotlib.figure import Figure

from tower_train import errors
from tower_train.inference import curves

COMMAND = importlib.import_module("tower_train.curves")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 20 steps that was stopped in between, one whose losses are twice as high, and the first one's result."""
    first, second = (tmp_path_factory.mktemp("runs") / name for name in ("slow", "fast"))
    for steps in (10, 20):
        options = dict(num_gpus=1, batch_size=16, max_steps=steps, eval_every_steps=10, validation_fraction=0.2)
        result = jobs.train_toy(first, **options)
    (second / "eval-validation").mkdir(parents=True)
    records = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    twice = [record | {name: 2 * record[name] for name in ("loss", "val_loss") if name in record} for record in records]
    (second / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in twice))
    return first, second, result


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
    assert runs[2].history == history


def test_a_metric_that_came_later_stands_beside_its_step(tmp_path):
    records = [{"loss": 1.0}, {"val_loss": 2.0}, {"val_loss": 1.5, "val_new": 0.5}]
    lines = [json.dumps({"step": step, "epoch": step / 10} | each) for step, each in enumerate(records, start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    history = curves.history(str(tmp_path))
    assert (history["val_step"], history["val_loss"], history["val_new"]) == ([2, 3], [2.0, 1.5], [None, 0.5])


def test_runs_are_drawn_and_tabulated_where_no_other_file_is(runs, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(runs[0])
    for words, stem in ((["run"], "run/curves"), *[(["run", str(runs[1])], "curves")] * 2):
        status, stdout, stderr = command(COMMAND, *words)
        assert (status, stderr) == (0, "") and f"Drawn:    {tmp_path}/{stem}.png, {tmp_path}/{stem}.svg\n" in stdout
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    texts = set(re.findall(r">([^<>]*)</text>", (tmp_path / "curves.svg").read_text()))
    common = os.path.commonpath([tmp_path, runs[1].parent])
    drawn = [os.path.relpath(run, common) for run in (tmp_path / "run", runs[1])]
    drawn = [f"{run}, {split}" for run in drawn for split in ("training", "validation")]
    assert {*drawn, "loss", "precision @ 1", "epochs", curves._NOTE} <= texts
    losses = [record["loss"] for record in jobs.metrics(runs[1])]
    assert re.search(f"training loss +{losses[-1]:.4g} +{min(losses):.4g} +{max(losses):.4g}\n", stdout)
    plotted = Figure()
    plotted.savefig(tmp_path / "curves.svg")  # by matplotlib, but not here
    mine = (tmp_path / "curves.svg").read_text()
    os.mkfifo(tmp_path / "fifo.png")
    shutil.copytree(runs[0], odd := tmp_path / "a$b$$ ^_")
    lines = (odd / "metrics.jsonl").read_text()
    (odd / "metrics.jsonl").write_text(lines + '{"step": 25, "lo')  # a power cut
    assert command(COMMAND, str(odd), str(runs[1]), "--out=both")[0] == 0
    for each in ('{"step": 25}', '{"step": 1, "epoch": 1e999}', '{"loss'):
        (odd / "metrics.jsonl").write_text(f"{lines}{each}\n")
        with pytest.raises(errors.RunError, match="metrics.jsonl cannot be read .line 7 is no record of a run"):
            curves.history(str(odd))
    for words, message in (
        ([], "No run is named"),
        (["--out=fifo", "run"], "fifo.png cannot be read .it is no regular file"),
        (["nowhere"], "nowhere/metrics.jsonl cannot be read"),
        (["--out=no/x", "run"], "no/x.png cannot be written: No such file"),
        (["run", "run"], "curves.svg is there, and was not written by this command"),
    ):
        status, _, stderr = command(COMMAND, *words)
        assert status == 2 and re.fullmatch(f"[^\n]*{message}[^\n]*\n", stderr)
    assert (tmp_path / "curves.svg").read_text() == mine


def test_a_loss_that_falls_far_is_drawn_over_its_logarithm_and_named_by_its_split(tmp_path, monkeypatch):
    for last, scale in ((0.1, "linear"), (0.01, "log"), (-0.01, "linear")):
        lists = {"step": [1, 2], "epoch": [0.5, 1], "loss": [2, last], "val_epoch": [1], "val_loss": [1]}
        monkeypatch.setattr(curves, "history", lambda _, lists=lists: dict(lists))
        figure = curves.draw_curves(tmp_path)
        assert figure.axes[0].get_yscale() == scale
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert re.search("training loss .*\n +test loss +1 ", "\n".join(curves.table([tmp_path])))
