"""A run that is killed at any moment and started again is the run that nobody killed."""

import json
import shutil
import signal

import jobs
import numpy as np
import pytest

OPTIONS = dict(dtype="float64", seed=3, learning_rate=0.001, summary_every_steps=10)
MORE_STEPS = 25


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A run as two kills leave it, before its first checkpoint and between two, and killed while it mostly saves."""
    folder = tmp_path_factory.mktemp("killed")
    for name, then, save_every_steps, step in (("first", "second", 0, 12), ("second", "run", 20, 33)):
        options = OPTIONS | dict(save_every_steps=save_every_steps, max_steps=40)
        jobs.train_toy(folder / name, [jobs.copy_after(step, folder / name, folder / then)], **options)
    assert jobs.saved_steps(folder / "second")[:1] == [20] and jobs.logged_step(folder / "run") == 30
    with jobs.Trainer(
        *jobs.toy_flags(folder / "run", max_steps=jobs.ENDLESS, **OPTIONS, save_every_steps=1)
    ) as trainer:
        trainer.wait_until(lambda: jobs.saved_step(folder / "run") > 20)
        assert trainer.end_by(signal.SIGKILL) == -signal.SIGKILL
    return folder / "run"


@pytest.fixture(scope="module")
def last_step(killed_run):
    return jobs.saved_step(killed_run) + MORE_STEPS


@pytest.fixture(scope="module")
def uninterrupted_run(last_step, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    jobs.train_toy(directory, max_steps=last_step, **OPTIONS)
    return directory


def test_a_killed_run_ends_as_an_uninterrupted_one(killed_run, uninterrupted_run, last_step, tmp_path):
    """With its variables, and with every step once in its log and in its curves."""
    run = tmp_path / "run"
    shutil.copytree(killed_run, run)
    assert jobs.train_toy(run, max_steps=last_step, **OPTIONS).step == last_step
    variables = jobs.variables(run, last_step)
    jobs.assert_identical(variables, jobs.variables(uninterrupted_run, last_step))
    assert (variables["global_step"], variables["examples_seen"]) == (last_step, last_step * 16)
    records = jobs.metrics_but_times(run)
    assert [record["step"] for record in records] == list(range(5, last_step + 1, 5))
    assert records == jobs.metrics_but_times(uninterrupted_run)
    for name in ("examples_per_sec", "total_loss"):
        points = jobs.events(run).Scalars(name)
        assert [event.step for event in points] == list(range(5, last_step + 1, 5))
    np.testing.assert_allclose([event.value for event in points], [record["loss"] for record in records], rtol=1e-6)


def test_a_killed_run_goes_on_with_another_tower_count(killed_run, uninterrupted_run, last_step, tmp_path):
    shutil.copytree(killed_run, tmp_path / "run")
    jobs.train_toy(tmp_path / "run", num_gpus=4, batch_size=4, max_steps=last_step, **OPTIONS)
    expected = jobs.variables(uninterrupted_run, last_step)
    jobs.assert_close(jobs.variables(tmp_path / "run", last_step), expected)
    assert [record["step"] for record in jobs.metrics(tmp_path / "run")] == list(range(5, last_step + 1, 5))


def test_a_run_that_was_moved_is_resumed(tmp_path, capsys):
    jobs.train_toy(tmp_path / "here", max_steps=20)
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    result = jobs.train_toy(tmp_path / "elsewhere", max_steps=25)
    assert "(resumed at step 20)" in capsys.readouterr().out
    assert result.checkpoint == str(tmp_path / "elsewhere" / "model.ckpt-25")
    assert jobs.saved_steps(tmp_path / "elsewhere") == [20, 25]
    assert not (tmp_path / "here").exists()


def test_a_finished_run_started_again_is_left_as_it_is(toy_run, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(toy_run, directory)
    (directory / "notes.txt").write_text("mine")
    before = jobs.contents(directory)
    curves = [(event.step, event.value) for event in jobs.events(directory).Scalars("total_loss")]
    result = jobs.train_toy(directory, max_steps=40)
    assert (result.step, result.loss) == (40, None)
    assert "Step 40 was reached before; nothing to do." in capsys.readouterr().out
    after, of_start = jobs.contents(directory), {"run.json", "result.json"}  # in which only the start's time is new
    assert {path: after[path] for path in before if path.name not in of_start} == {
        path: content for path, content in before.items() if path.name not in of_start
    }
    assert jobs.read_json(directory, "result.json").keys() - json.loads(before[directory / "result.json"]) <= {
        "started"
    }
    assert jobs.read_json(directory, "result.json")["step"] == 40
    assert [(event.step, event.value) for event in jobs.events(directory).Scalars("total_loss")] == curves


def test_nothing_that_lies_in_a_train_dir_is_deleted(tmp_path):
    (tmp_path / "eval").mkdir()
    mine = [tmp_path / "notes.txt", tmp_path / "eval" / "mine.csv", tmp_path / "model.ckpt-7.old"]
    for path in mine:
        path.write_text("mine")
    for max_steps in (10, 20):
        jobs.train_toy(tmp_path, max_steps=max_steps, save_every_steps=5, keep_checkpoints=1, eval_every_steps=10)
    assert [path.read_text() for path in mine] == ["mine"] * 3
