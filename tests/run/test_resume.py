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
    """A run killed three times: before its first checkpoint, between two, and while it does little else than save."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    for save_every_steps, steps_after_saving in ((0, 10), (200, 30), (1, 0)):
        saved = jobs.saved_step(directory)

        def is_the_moment(saved=saved, save_every_steps=save_every_steps, steps_after_saving=steps_after_saving):
            has_saved = not save_every_steps or jobs.saved_step(directory) > saved
            return has_saved and jobs.logged_step(directory) >= jobs.saved_step(directory) + steps_after_saving

        words = jobs.toy_flags(directory, max_steps=jobs.ENDLESS, **(OPTIONS | {"save_every_steps": save_every_steps}))
        with jobs.Trainer(*words) as trainer:
            trainer.wait_until(is_the_moment)
            assert trainer.end_by(signal.SIGKILL) == -signal.SIGKILL
        if not save_every_steps:
            assert jobs.saved_step(directory) == 0 and jobs.logged_step(directory) >= 10
    return directory


@pytest.fixture(scope="module")
def last_step(killed_run):
    return jobs.saved_step(killed_run) + MORE_STEPS


@pytest.fixture(scope="module")
def uninterrupted_run(last_step, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    jobs.train_toy(directory, max_steps=last_step, **OPTIONS)
    return directory


@pytest.fixture(scope="module")
def resumed_run(killed_run, last_step, tmp_path_factory):
    directory = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(killed_run, directory)
    assert jobs.train_toy(directory, max_steps=last_step, **OPTIONS).step == last_step
    return directory


def test_a_killed_run_ends_with_the_variables_of_an_uninterrupted_one(resumed_run, uninterrupted_run, last_step):
    variables = jobs.variables(resumed_run, last_step)
    jobs.assert_identical(variables, jobs.variables(uninterrupted_run, last_step))
    assert variables["global_step"] == last_step
    assert variables["examples_seen"] == last_step * 16


def test_a_killed_run_logs_every_step_once_and_as_an_uninterrupted_one(resumed_run, uninterrupted_run, last_step):
    records = jobs.metrics_but_times(resumed_run)
    assert [record["step"] for record in records] == list(range(5, last_step + 1, 5))
    assert records == jobs.metrics_but_times(uninterrupted_run)


def test_a_killed_run_has_every_step_once_in_its_curves(resumed_run, last_step):
    curves = jobs.events(resumed_run)
    assert [event.step for event in curves.Scalars("examples_per_sec")] == list(range(5, last_step + 1, 5))
    losses = curves.Scalars("total_loss")
    assert [event.step for event in losses] == list(range(5, last_step + 1, 5))
    logged = {record["step"]: record["loss"] for record in jobs.metrics(resumed_run)}
    np.testing.assert_allclose([event.value for event in losses], [logged[event.step] for event in losses], rtol=1e-6)


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
