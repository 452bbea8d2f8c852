"""python -m tower_train.evaluate: what it prints is what it found, and a mistake is one line."""

import shutil

import jobs
import pytest
import small_disk
import toy_workload

from tower_train import evaluate
from tower_train.inference import report


@pytest.mark.parametrize(("word", "weights"), [("--raw=False", "moving averages"), ("--raw", "raw weights")])
def test_it_prints_the_metrics_and_a_confusion_matrix(word, weights, command, run):
    status, stdout, stderr = command(evaluate, f"--train_dir={run}", "--workload=toy_workload", word)
    assert (status, stderr) == (0, "")
    found = jobs.read_json(run, "result.json")["evaluation"]
    metric = found["metrics"]["precision @ 1"]
    lines = stdout.splitlines()
    assert lines[:2] == [
        f"step 12: 50 examples of toy test, {weights}",
        f"precision @ 1 = {metric['mean']:.3f} (95 % interval {metric['low']:.3f} to {metric['high']:.3f})",
    ]
    assert lines[-5] == "confusion matrix (row: true class, column: predicted class)"
    table, names = found["confusion"], toy_workload.CLASSES
    rows = [[name, *map(str, row)] for name, row in zip(names, table, strict=True)]
    assert [line.split() for line in lines[-4:]] == [[*names], *rows]
    assert sum(map(sum, table)) == 50
    assert metric["mean"] == pytest.approx(sum(table[i][i] for i in range(3)) / 50)


def test_a_confusion_matrix_of_long_names_has_columns_by_number():
    _, columns, *rows = report.confusion_lines([[1, 0], [2, 3]], ("a" * 70, "b" * 70))
    assert [line.split() for line in (columns, *rows)] == [
        ["0", "1"],
        ["a" * 70, "0", "1", "0"],
        ["b" * 70, "1", "2", "3"],
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--train_dir is missing"),
        (["--train_dir={none}"], "--train_dir={none} holds no run: run.json is missing"),
        (["--train_dir={no_checkpoint}"], "--train_dir={no_checkpoint} holds no checkpoint yet"),
        (["--train_dir={run}", "--workload=cifar10"], "{run} is a run of workload toy, not of cifar10"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_changes_nothing(words, part, refusal, run, tmp_path):
    places = {"run": run, "none": tmp_path / "none", "no_checkpoint": tmp_path}
    shutil.copy(run / "run.json", tmp_path)
    before = jobs.contents(run)
    assert part.format(**places) in refusal(evaluate, *(word.format(**places) for word in words))
    assert jobs.contents(run) == before and not places["none"].exists()


@pytest.fixture
def read_only_run(run, tmp_path):
    """A copy of a run in which nothing can be written."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("result.json", "eval"))
    is_root = small_disk.can_mount(tmp_path / "disk")
    small_disk.make_read_only(copy) if is_root else copy.chmod(0o500)
    yield copy
    small_disk.unmount(copy) if is_root else copy.chmod(0o700)


def test_on_a_run_that_may_only_be_read_the_result_is_shown_and_said_not_to_be_kept(command, run, read_only_run):
    _, expected, _ = command(evaluate, f"--train_dir={run}", "--workload=toy_workload")
    status, stdout, stderr = command(evaluate, f"--train_dir={read_only_run}", "--workload=toy_workload")
    assert (status, stdout) == (0, expected)
    begins = f"tower_train: the evaluation of step 12 is shown, not kept: {read_only_run}/result.json cannot be written"
    assert stderr.startswith(begins) and stderr.count("\n") == 1
    assert not (read_only_run / "result.json").exists() and not (read_only_run / "eval").exists()
