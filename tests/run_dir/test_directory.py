"""A train_dir has one trainer at a time, and files that are whole; anything else in their place is one line. Its curves
are those of the run."""

import fcntl
import json
import os
import shutil
import threading
import time

import hypothesis
import jobs
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

from tower_train import EvaluateOptions, errors, evaluate_run, files
from tower_train.run_dir import directory


def test_a_second_trainer_is_turned_away_and_touches_nothing(run):
    before = jobs.contents(run)
    with directory.RunDirectory(run).locked():
        with pytest.raises(errors.RunError) as refusal:
            jobs.train_toy(run, max_steps=45)
    assert str(refusal.value) == (
        f"--train_dir={run} is in use by another trainer (process {os.getpid()}). Wait for it, stop it, or give "
        "another directory."
    )
    assert jobs.contents(run) == before
    assert jobs.train_toy(run, max_steps=45).step == 45


def test_a_look_at_the_lock_neither_keeps_it_nor_turns_a_trainer_away(tmp_path, monkeypatch):
    """A longer look than it takes ends while the trainer pauses."""
    assert (
        not directory.RunDirectory(tmp_path / "none").is_locked() and not directory.RunDirectory(tmp_path).is_locked()
    )
    with open(tmp_path / directory.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        monkeypatch.setattr(directory.time, "sleep", lambda _: fcntl.flock(lock, fcntl.LOCK_UN))
        with directory.RunDirectory(tmp_path).locked():
            assert directory.RunDirectory(tmp_path).is_locked()
    assert not directory.RunDirectory(tmp_path).is_locked()
    with open(tmp_path / directory.LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_a_failed_start_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    flock, removed = fcntl.flock, []

    def flock_late(lock, how):
        flock(lock, how)
        if not removed:
            removed.append((tmp_path / directory.LOCK).unlink())

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with directory.RunDirectory(tmp_path).locked():
        assert removed and directory.RunDirectory(tmp_path).is_locked()


@pytest.mark.parametrize("name", ["lr=[0.1]", "a\\b"])
def test_a_train_dir_that_tensorflow_takes_for_a_pattern_is_an_error(name, tmp_path):
    with pytest.raises(errors.RunError, match="for a pattern"), directory.RunDirectory(tmp_path / name).locked():
        pass
    assert list(tmp_path.iterdir()) == []


def _line(step):
    return json.dumps({"step": step, "epoch": 0.5, "loss": 0.5})


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param(f"{_line(5)}\n{_line(10)}\n{_line(15)}\n", [5, 10], id="later steps"),
        pytest.param(f"{_line(5)}\n{_line(10)[:9]}", [5], id="cut inside a line"),
        pytest.param(f"{_line(5)}\n{_line(10)}", [5, 10], id="cut before the end of a line"),
        pytest.param(f"{_line(15)}\n", [], id="nothing to keep"),
        pytest.param('{"step": true}\n{"step": "5"}\n{"step": 1.0}\n{"loss": 1}\n[5]\n5\n"step"\n', [], id="no steps"),
    ],
)
def test_metrics_are_cut_to_whole_lines_of_steps_that_stay(text, kept, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    directory.RunDirectory(tmp_path).cut_metrics(last_step=10)
    with open(tmp_path / "metrics.jsonl", "a") as file:  # as the next log line is
        file.write(_line(11) + "\n")
    assert [record["step"] for record in jobs.metrics(tmp_path)] == [*kept, 11]


def test_updates_of_several_writers_are_all_kept(tmp_path):
    def update(name):
        for i in range(20):
            directory.RunDirectory(tmp_path).update("x.json", {f"{name}{i}": i})

    writers = [threading.Thread(target=update, args=[name]) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    expected = {f"{name}{i}": i for name in "ab" for i in range(20)}
    assert directory.RunDirectory(tmp_path).read("x.json") == expected


@pytest.mark.parametrize("name", [b"a\nb", b"a\xff\xfeb", b"x" * 256])
def test_a_train_dir_of_any_name_is_used_or_refused_in_one_line(name, tmp_path):
    path = os.fsdecode(bytes(tmp_path) + b"/" + name)
    try:
        jobs.train_small(path, max_steps=2)
    except errors.RunError as error:
        assert str(error).isprintable()
        assert os.listdir(bytes(tmp_path)) == []
    else:
        assert os.path.exists(bytes(tmp_path) + b"/" + name + b"/model.ckpt-2.index")
        assert os.listdir(bytes(tmp_path)) == [name]


def evaluate(train_dir):
    list(evaluate_run(EvaluateOptions(train_dir=str(train_dir))))


def refusal(function, *arguments, **options):
    """The text of the RunError that a function raises, in one line."""
    with pytest.raises(errors.RunError) as raised:
        function(*arguments, **options)
    assert str(raised.value).isprintable() and raised.value.exit_status == 2
    return str(raised.value)


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "model.ckpt-40.index", "best", "plugins/profile", "events.out.tfevents.9"]
)
def test_a_run_with_a_link_in_the_place_of_what_it_writes_is_refused(name, run, tmp_path):
    """It may be a stranger's, by which another file would be overwritten."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("mine")
    shutil.rmtree(run / name.partition("/")[0], ignore_errors=True) if "/" in name else None
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    is_folder = name in ("best", "eval", "plugins/profile")
    (run / name).symlink_to(tmp_path / "mine" / ("" if is_folder else "letter"))
    for function, options in ((evaluate, {}), (jobs.train_toy, dict(max_steps=45))):
        assert refusal(function, run, **options).startswith(f"{run / name} is a symbolic link, and ")
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == {"letter": "mine"}
    with pytest.raises(OSError, match="is a symbolic link|Is a directory"):
        files.open_in_run(run / name, "ab")


@pytest.mark.parametrize(
    ("content", "why"), [("[]", "it is no JSON object"), ('{"workload": "toy"}', "dataset is mis")]
)
def test_a_file_of_something_else_is_one_line(content, why, run):
    (run / "run.json").write_text(content)
    for function, options in ((evaluate, {}), (jobs.train_toy, dict(max_steps=60))):
        assert refusal(function, run, **options).startswith(f"{run / 'run.json'} cannot be read ({why}")


def test_options_that_the_workload_does_not_take_are_told_with_the_file(run):
    """Except one that was off, which an earlier version had."""
    content = jobs.read_json(run, "run.json")
    (run / "run.json").write_text(json.dumps(content | {"workload_options": {"gone": 0}}))
    evaluate(run)
    (run / "run.json").write_text(json.dumps(content | {"workload_options": {"size": 3}}))
    assert refusal(evaluate, run).startswith(f"{run / 'run.json'} does not fit its workload: ")


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.example(content=b'{"a":' * 20_000)
@hypothesis.given(content=strategies.binary(max_size=100) | strategies.text(max_size=50).map(str.encode))
def test_any_json_file_is_an_object_or_a_run_error(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "run.json").write_bytes(content)
    try:
        assert isinstance(directory.RunDirectory(folder).read("run.json"), dict)
    except errors.RunError as error:
        assert str(folder / "run.json") in str(error)


SCOPES = ("conv1", "conv2", "local3", "local4", "softmax_linear")


@pytest.fixture(scope="module")
def cifar10_curves(cifar10_run):
    return jobs.events(cifar10_run[0])


def test_curves_and_metrics_jsonl_tell_the_same(cifar10_run, cifar10_curves):
    for points in (cifar10_curves.Scalars("conv1/sparsity"), cifar10_curves.Histograms("conv1/weights")):
        assert [event.step for event in points] == [6, 12, 18, 24]
    logged = {record["step"]: record for record in jobs.metrics(cifar10_run[0])}
    for tag, name in (("total_loss", "loss"), ("learning_rate", "learning_rate"), ("examples_per_sec",) * 2):
        points = {event.step: event.value for event in cifar10_curves.Scalars(tag)}
        assert list(points) == [4, 8, 12, 16, 20, 24]
        assert points == pytest.approx({step: record[name] for step, record in logged.items()}, rel=1e-6)
    decays = [a.value - b.value for a, b in zip(*map(cifar10_curves.Scalars, ("total_loss", "loss")), strict=True)]
    weights = [jobs.variables(cifar10_run[0], 24)[f"{scope}/weights"] for scope in ("local3", "local4")]
    expected = sum(0.004 * np.sum(np.square(w, dtype=np.float64)) / 2 for w in weights)  # after the last step
    assert decays[-1] == pytest.approx(expected, rel=1e-2)


def test_the_graph_is_drawn_with_a_box_for_each_tower_layer_and_part_of_the_step(cifar10_run, cifar10_curves):
    graph = cifar10_curves.Graph()
    names = {node.name for node in graph.node}
    assert len(names) == len(graph.node) and graph.ByteSize() < 10**6
    towers = {"tower_0", "tower_1"}
    parts = {"input", "learning_rate", "average_gradients", "weight_decay", "check_finite", "report"}
    assert {name.split("/")[0] for name in names} >= {"global_step", "examples_seen"} | towers | parts | set(SCOPES)
    for tower in towers:  # each the same network, and its gradients
        assert {f"{tower}/{scope}" for scope in SCOPES} <= {"/".join(name.split("/")[:2]) for name in names}
    sources = {source.removeprefix("^").split(":")[0] for node in graph.node for source in node.input}
    assert sources <= names, "an edge leads nowhere"
    assert max(node.ByteSize() for node in graph.node) < 4000
    outputs = [node.attr["_output_shapes"].list.shape for node in graph.node if node.name == "tower_1/conv1/conv1"]
    assert [[dimension.size for dimension in shape.dim] for shape in outputs[0]] == [[5, 24, 24, 64]]


def test_a_resume_neither_loses_nor_repeats_a_point(run, monkeypatch):
    """Also not the point of the step it begins at, nor where the clock was set back between two starts."""
    now, now_ns = time.time, time.time_ns
    for hours, max_steps in ((-1, 60), (-300_000, 80)):  # the last to a time that has fewer digits
        monkeypatch.setattr(time, "time", lambda hours=hours: now() + 3600 * hours)
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: now_ns() + 3600 * 10**9 * hours)
        jobs.train_toy(run, max_steps=max_steps, summary_every_steps=10)
    curves = jobs.events(run)
    for name in ("total_loss", "examples_per_sec"):
        assert [event.step for event in curves.Scalars(name)] == list(range(5, 81, 5))
    paths = map(str, run.glob("events.out.*"))
    events = [event for path in paths for event in tf.compat.v1.train.summary_iterator(path)]
    assert sum(bool(event.graph_def) for event in events) == 1
    assert [event.step for event in curves.Histograms("hidden/weights")] == list(range(10, 81, 10))
