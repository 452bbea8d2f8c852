"""A disk that is full, read-only or emptied costs no checkpoint, no whole line and no traceback."""

import json
import resource
import shutil
import signal

import jobs
import pytest
import small_disk
import tensorflow as tf

from tower_train import errors
from tower_train.inference import curves
from tower_train.run_dir import directory, logs

v1 = tf.compat.v1
# No log line comes after a disk takes files again: the next save writes those that wait.
EVERY = dict(save_every_steps=10, log_every_steps=15, summary_every_steps=0)


@pytest.fixture
def size_limit():
    """Sets the greatest size of a file of this process; what is longer fails as on a full disk, with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs.train_small(folder, max_steps=40, **EVERY)
    return folder


@pytest.fixture(params=["full", "read-only", "no file above 100 bytes"])
def trouble(request, size_limit, tmp_path):
    """(a run's directory, what begins the trouble, what ends it, the reason that is told)"""
    run = tmp_path / "disk" / "run"
    if request.param.startswith("no file"):
        yield run, lambda: size_limit(100), lambda: size_limit(None), "File too large"
        return
    if not small_disk.can_mount(tmp_path / "disk"):
        pytest.skip("mounting a small file system needs root")
    with small_disk.mounted(tmp_path / "disk", 1) as disk:
        if request.param == "full":
            yield run, lambda: small_disk.fill(disk), lambda: (disk / "filler").unlink(), ""
        else:
            yield run, lambda: small_disk.make_read_only(run), lambda: small_disk.unmount(run), "Read-only file system"


def test_a_run_outlives_a_disk_that_takes_nothing_and_ends_as_if_it_always_had(trouble, undisturbed, capsys):
    run, begin, end, reason = trouble
    result = jobs.train_small(run, {12: begin, 32: end}, max_steps=40, **EVERY)
    output = capsys.readouterr().out
    assert (result.step, result.failed_saves) == (40, 2) and reason in output
    for number, step in ((1, 20), (2, 30)):
        assert f"*** Failed save number {number}: the checkpoint of step {step} could not be saved (" in output
    assert jobs.saved_steps(run) == [10, 40]
    jobs.assert_identical(jobs.variables(run, 40), jobs.variables(undisturbed, 40))
    assert jobs.metrics_but_times(run) == jobs.metrics_but_times(undisturbed)
    assert [event.step for event in jobs.events(run).Scalars("examples_per_sec")] == [15, 30, 40]
    assert not list(run.glob("*tempstate*"))


def test_where_the_last_save_fails_the_status_says_so_and_the_good_checkpoints_stay(size_limit, undisturbed, tmp_path):
    jobs.train_small(tmp_path, max_steps=20, **EVERY)
    before = {path: path.read_bytes() for path in tmp_path.glob("model.ckpt-*")}
    with pytest.raises(errors.SaveError, match=r"ended at step 40, but the checkpoint of step 40 could not be saved"):
        jobs.train_small(tmp_path, {1: lambda: size_limit(100)}, max_steps=40, **EVERY)
    assert errors.SaveError.exit_status == 4
    before[tmp_path / "run.json"] = (tmp_path / "run.json").read_bytes()
    with pytest.raises(errors.RunError, match="run.json cannot be written .File too large"):
        jobs.train_small(tmp_path, max_steps=40, **EVERY)
    assert {path: path.read_bytes() for path in before} == before and not list(tmp_path.glob(".run.json.*"))
    size_limit(None)
    jobs.train_small(tmp_path, max_steps=40, **EVERY)
    jobs.assert_identical(jobs.variables(tmp_path, 40), jobs.variables(undisturbed, 40))


def test_a_run_that_could_never_save_names_no_checkpoint(size_limit, tmp_path, capsys):
    with pytest.raises(errors.SaveError):
        jobs.train_small(tmp_path, {1: lambda: size_limit(100)}, max_steps=5, **EVERY)
    printed = capsys.readouterr().out
    assert "\nSaved:    no checkpoint\n" in printed and "\nCurves: " in printed and "Evaluate" not in printed


def test_no_save_is_made_in_a_train_dir_that_was_taken_away_until_it_is_back(undisturbed, tmp_path, capsys):
    run, away = tmp_path / "run", tmp_path / "away"
    actions = {12: lambda: run.rename(away), 22: lambda: away.rename(run)}
    result = jobs.train_small(run, actions, max_steps=40, eval_every_steps=20, **EVERY)
    assert (result.step, result.failed_saves) == (40, 1)
    assert curves.history(run)["val_step"] == [30, 40], "after the next save"
    told = capsys.readouterr().out
    assert "*** Failed save number 1: the checkpoint of step 20 could not be saved (" in told
    assert "was deleted or moved; move it back" in told
    assert jobs.saved_steps(run) == [10, 30, 40]
    jobs.assert_identical(jobs.variables(run, 40), jobs.variables(undisturbed, 40))
    assert jobs.metrics_but_times(run) == jobs.metrics_but_times(undisturbed)
    assert [event.step for event in jobs.events(run).Scalars("examples_per_sec")] == [15, 30, 40]
    with pytest.raises(errors.SaveError, match="ended at step 60, but the checkpoint of step 60 could not be saved"):
        jobs.train_small(run, {2: lambda: run.rename(away)}, max_steps=60, **EVERY)
    assert not run.exists()


def test_a_run_whose_run_json_is_removed_meanwhile_ends_with_its_result(tmp_path):
    result = jobs.train_small(tmp_path, {2: (tmp_path / "run.json").unlink}, max_steps=4, **EVERY)
    assert result.step == 4 and jobs.read_json(tmp_path, "result.json")["stopped_by"] == "last step"


def test_a_directory_that_was_deleted_and_taken_over_is_left_to_the_new_trainer(tmp_path):
    mine, others = directory.RunDirectory(tmp_path / "run"), directory.RunDirectory(tmp_path / "run")
    with mine.locked():
        mine.check_held()
        shutil.rmtree(tmp_path / "run")
        with others.locked(), pytest.raises(OSError, match="was deleted or moved"):
            mine.check_held()


def test_lines_and_curves_that_could_not_be_written_follow_later_and_none_is_ever_cut(size_limit, tmp_path, capsys):
    """There is room for a part of the next one."""
    file = logs.MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(10):
        if step in (3, 7):
            size_limit((tmp_path / "metrics.jsonl").stat().st_size + 15 if step == 3 else None)
        file.append({"step": step, "text": "x" * 20})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(min(step, 2) + 1 if step < 7 else step + 1))
    writer = logs.EventWriter(tmp_path, "curves")
    for step in range(10):
        if step == 3:
            size_limit(next((tmp_path / "curves").iterdir()).stat().st_size + 15)
        logs.add_scalars(writer, {"a": step / 2}, step)
    size_limit(None)
    writer.close()
    assert [event.step for event in jobs.events(tmp_path / "curves").Scalars("a")] == list(range(10))
    for path in (tmp_path / "curves").iterdir():  # none ends in the half of an event, which is an error to a reader
        assert len(list(v1.io.tf_record_iterator(str(path)))) >= 2
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"*** {tmp_path}/metrics.jsonl cannot be written (")
    assert told[1] == f"*** {tmp_path}/metrics.jsonl can be written again, after 4 failures."
    assert "events.out.* cannot be written (" in told[2] and "can be written again, after " in told[-1]
