"""A train_dir has one trainer at a time, and files that are whole at any moment."""

import fcntl
import json
import os
import threading

import jobs
import pytest

from tower_train import errors
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


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*", "a?", "a\\b"])
def test_a_train_dir_that_tensorflow_takes_for_a_pattern_is_an_error(name, tmp_path):
    with pytest.raises(errors.RunError, match="for a pattern"), directory.RunDirectory(tmp_path / name).locked():
        pass
    assert list(tmp_path.iterdir()) == []


def _line(step):
    return json.dumps({"step": step, "loss": 0.5})


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param(f"{_line(5)}\n{_line(10)}\n{_line(15)}\n", [5, 10], id="later steps"),
        pytest.param(f"{_line(5)}\n{_line(10)}\n", [5, 10], id="nothing to drop"),
        pytest.param(f"{_line(5)}\n{_line(10)}\n{_line(15)[:9]}", [5, 10], id="cut inside a later line"),
        pytest.param(f"{_line(5)}\n{_line(10)[:9]}", [5], id="cut inside a line"),
        pytest.param(f"{_line(5)}\n{_line(10)}", [5, 10], id="cut before the end of a line"),
        pytest.param(f"{_line(15)}\n", [], id="nothing to keep"),
        pytest.param("", [], id="empty"),
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
