"""python -m tower_train.evaluate: what it prints is what it found, and a mistake is one line."""

import functools
import re
import shutil

import jobs
import pytest

from tower_train import evaluate


@pytest.fixture
def main(command):
    return functools.partial(command, evaluate)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a short run."""
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    jobs.train_toy(directory, max_steps=20)
    return directory


@pytest.mark.parametrize(("word", "weights"), [("--raw=False", "moving averages"), ("--raw", "raw weights")])
def test_it_prints_the_metrics_and_a_confusion_matrix(word, weights, main, run):
    status, stdout, stderr = main(f"--train_dir={run}", word)
    assert (status, stderr) == (0, "")
    found = jobs.read_json(run, "result.json")["evaluation"]
    metric = found["metrics"]["precision @ 1"]
    lines = stdout.splitlines()
    assert lines[:2] == [
        f"step 20: 50 examples of toy test, {weights}",
        f"precision @ 1 = {metric['mean']:.3f} (95 % interval {metric['low']:.3f} to {metric['high']:.3f})",
    ]
    table = [[int(number) for number in re.findall(r"\d+", line)] for line in lines[-3:]]
    assert table == found["confusion"]
    assert sum(map(sum, table)) == 50
    assert metric["mean"] == pytest.approx(sum(table[i][i] for i in range(3)) / 50)


def test_while_watching_it_prints_no_confusion_matrix(main, run):
    status, stdout, _ = main(f"--train_dir={run}", "--watch")
    assert status == 0
    assert [line.partition(" ")[0] for line in stdout.splitlines()] == ["step", "precision"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--train_dir is missing"),
        (["--train_dir=gs://bucket/run"], "--train_dir=gs://bucket/run: it must be a local or mounted folder"),
        (["--train_dir={empty}"], "--train_dir={empty} holds no run: run.json is missing"),
        (["--train_dir={no_checkpoint}"], "--train_dir={no_checkpoint} holds no checkpoint yet"),
        (["--train_dir={run}", "--workload=cifar10"], "{run} is a run of workload toy, not of cifar10"),
        (["--train_dir={run}", "--workload=no_such"], "no module 'no_such'"),
        (["--train_dir={run}", "--dataset=mnist"], "--dataset=mnist: workload toy knows auto only"),
        (["--train_dir={run}", "--batch_size=0"], "--batch_size=0: it must be a whole number at least 1"),
        (["--train_dir={run}", "--watch_secs=0"], "--watch_secs=0"),
        (["--train_dir={run}", "--device=gpu"], "this machine's GPUs are: none"),
        (["--train_dir={run}", "--num_gpu=2"], "--help"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_changes_nothing(words, part, main, run, tmp_path):
    places = {"run": run, "empty": tmp_path / "empty", "no_checkpoint": tmp_path / "no_checkpoint"}
    places["empty"].mkdir()
    places["no_checkpoint"].mkdir()
    shutil.copy(run / "run.json", places["no_checkpoint"])
    before = jobs.contents(run)
    status, stdout, stderr = main(*(word.format(**places) for word in words))
    assert status == 2
    assert stdout == ""
    assert re.fullmatch(r"tower_train: error: .+\n", stderr), stderr
    assert part.format(**places) in stderr
    assert jobs.contents(run) == before


def test_a_directory_that_does_not_exist_is_not_made(main, tmp_path):
    status, _, stderr = main(f"--train_dir={tmp_path / 'none'}")
    assert status == 2 and "holds no run" in stderr
    assert not (tmp_path / "none").exists()
