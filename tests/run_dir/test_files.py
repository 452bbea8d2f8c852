"""Anything may be in the place of a run's files, with any content: one line that names the file and the field."""

import json
import os
import signal

import jobs
import pytest

from tower_train import EvaluateOptions, errors, evaluate_run
from tower_train.run_dir import directory

CHECKPOINT = ["checkpoint", "model.ckpt-40.index", "model.ckpt-40.data-00000-of-00001", "best/model.ckpt-5.index"]
FILES = ["run.json", "result.json", "best.json", "metrics.jsonl", ".lock", ".result.json.lock", *CHECKPOINT]


@pytest.fixture
def run(run):
    """A process that waits for more than 60 seconds is ended."""
    signal.alarm(60)
    yield run
    signal.alarm(0)


def evaluate(train_dir):
    list(evaluate_run(EvaluateOptions(train_dir=str(train_dir))))


def refusal(function, *arguments, **options):
    """The text of the RunError that a function raises, in one line."""
    with pytest.raises(errors.RunError) as raised:
        function(*arguments, **options)
    assert str(raised.value).isprintable() and raised.value.exit_status == 2
    return str(raised.value)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["a FIFO", "a directory"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_at_a_files_place_is_one_line_and_nothing_is_waited_for(name, put, run):
    (run / "best").mkdir()
    (run / name).unlink(missing_ok=True)
    put(run / name)
    expected = f"{run / name} is no file, and so not of a run. Move it away."
    assert refusal(evaluate, run) == expected
    assert refusal(jobs.train_toy, run, max_steps=45) == expected


def score(step, **changed):
    return {"step": step, "examples": 16 * step, "value": 0.5} | changed


EVALUATION = {"step": 5, "metrics": {"p": {"mean": 0.5, "low": None, "high": 0.7}}, "confusion": [[1, 0], [2, 3]]}
BEST = {"metric": "p", "best": score(5), "last": score(10)}
MISSING = object()
WRONG = [  # (file, field, its value, words of what is allowed)
    ("run.json", "workload", MISSING, "is missing"),
    ("run.json", "config.seed", MISSING, "is missing"),
    ("run.json", "workload", 5, "text"),
    ("run.json", "data", "CIFAR-10", "an object"),
    ("run.json", "config.dtype", "complex64", "one of float32"),
    ("run.json", "config.seed", "0", "a whole number"),
    ("run.json", "config.seed", True, "a whole number"),
    ("run.json", "config.ema", "0.9", "a number"),
    ("run.json", "config.deterministic", "yes", "true or false"),
    ("result.json", "step", True, "a whole number"),
    ("result.json", "evaluation.step", "5", "a whole number"),
    ("best.json", "best.value", True, "a number"),
    ("best.json", "best.step", 5.0, "a whole number"),
]


def changed(content, field, value):
    """A copy of a file's content with another value in a field, or without it."""
    name, _, rest = field.partition(".")
    content = content | {name: changed(content.get(name, {}), rest, value) if rest else value}
    return {name: value for name, value in content.items() if value is not MISSING}


@pytest.mark.parametrize(("name", "field", "value", "allowed"), WRONG)
def test_a_value_of_a_wrong_type_is_one_line_with_the_file_and_the_field(name, field, value, allowed, run):
    """Also for a training and an evaluation, before they begin."""
    run_dir = directory.RunDirectory(run)
    contents = {"run.json": run_dir.read("run.json"), "result.json": {"evaluation": EVALUATION}, "best.json": BEST}
    (run / name).write_text(json.dumps(changed(contents[name], field, value)))
    message = refusal(run_dir.read, name)
    assert message.startswith(f"{run / name} cannot be read ({field}") and allowed in message
    before = jobs.contents(run)
    options = dict(max_steps=60, eval_every_steps=5, keep_best=True, eval_at_end=True)
    assert refusal(jobs.train_toy, run, **options) == message
    assert name == "best.json" or refusal(evaluate, run) == message
    assert jobs.contents(run) == before
    (run / name).write_text(json.dumps(contents[name]))
    assert run_dir.read(name) == contents[name]


def test_options_that_the_workload_does_not_take_are_told_with_the_file(run):
    content = jobs.read_json(run, "run.json") | {"workload_options": {"size": 3}}
    (run / "run.json").write_text(json.dumps(content))
    assert refusal(evaluate, run).startswith(f"{run / 'run.json'} does not fit its workload: ")


def test_the_dense_matrix_of_an_old_result_is_read(run):
    dense = {"evaluation": EVALUATION | {"confusion": [[i * j % 7 for j in range(300)] for i in range(300)]}}
    (run / "result.json").write_text(json.dumps(dense, indent=2))
    assert directory.RunDirectory(run).read("result.json") == dense
    evaluate(run)
    assert len(jobs.read_json(run, "result.json")["evaluation"]["confusion"]) == 3
