"""The same command gives the same run, also where it was killed at any moment and started again."""

import dataclasses
import json
import math
import re
import shutil
import signal

import jobs
import numpy as np
import pytest
import toy_workload

from tower_train import Config, train


def test_the_same_command_gives_the_same_run_to_the_last_bit(cifar10_run, cifar10_command, tmp_path):
    process = jobs.command("tower_train", *cifar10_command, f"--train_dir={tmp_path / 'again'}")
    assert process.returncode == 0, process.stderr
    first, again = cifar10_run[0], tmp_path / "again"
    assert jobs.metrics_but_times(again) == jobs.metrics_but_times(first)
    for step in (12, 24):
        jobs.assert_identical(jobs.variables(again, step), jobs.variables(first, step))
    evaluations = [jobs.read_json(directory, "result.json")["evaluation"] for directory in (first, again)]
    losses = [evaluation["metrics"].pop("loss")["mean"] for evaluation in evaluations]
    assert evaluations[0] | {"seconds": 0} == evaluations[1] | {"seconds": 0}
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_result_is_returned_and_written(tmp_path):
    result = jobs.train_toy(tmp_path / "run", max_steps=12, log_every_steps=4)
    assert result.stopped_by == "last step"
    assert result == dataclasses.replace(
        result, train_dir=str(tmp_path / "run"), step=12, data="toy train", notice=None,
        checkpoint=str(tmp_path / "run" / "model.ckpt-12"), loss=jobs.metrics(tmp_path / "run")[-1]["loss"],
    )  # fmt: skip
    assert 0 < result.examples_per_sec < math.inf and result.seconds > 0
    started = jobs.read_json(tmp_path / "run", "run.json")["started"]
    assert jobs.read_json(tmp_path / "run", "result.json") == result.as_dict() | {"started": started}


def test_a_run_without_a_train_dir_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(toy_workload.WORKLOAD, Config(max_steps=2, batch_size=4))
    assert re.fullmatch(r"runs/toy-\d{8}-\d{6}", result.train_dir)
    assert jobs.saved_steps(tmp_path / result.train_dir) == [2]
    train(toy_workload.WORKLOAD, Config(max_steps=3, batch_size=4, train_dir=result.train_dir))
    assert jobs.saved_steps(tmp_path / result.train_dir) == [2, 3]


OPTIONS = dict(dtype="float64", seed=3, learning_rate=0.001, summary_every_steps=10)
MORE_STEPS = 25


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A run as two kills leave it, before its first checkpoint and between two, and killed while it mostly saves; it
    was moved each time."""
    folder = tmp_path_factory.mktemp("killed")
    for name, then, save_every_steps, step in (("first", "second", 0, 12), ("second", "run", 20, 33)):
        options = OPTIONS | dict(save_every_steps=save_every_steps, max_steps=40)
        jobs.train_toy(folder / name, [jobs.copy_after(step, folder / name, folder / then)], **options)
        assert jobs.saved_steps(folder / name)[:1] == [save_every_steps or 40]
        shutil.rmtree(folder / name)
    assert jobs.logged_step(folder / "run") == 30
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


@pytest.mark.parametrize("towers", [{}, dict(num_gpus=4, batch_size=4)])
def test_a_killed_run_ends_as_an_uninterrupted_one(towers, killed_run, uninterrupted_run, last_step, tmp_path):
    """With its variables, and with every step once in its log and in its curves; also with another tower count."""
    run = tmp_path / "run"
    shutil.copytree(killed_run, run)
    assert jobs.train_toy(run, max_steps=last_step, **OPTIONS | towers).step == last_step
    variables = jobs.variables(run, last_step)
    assert_same = jobs.assert_close if towers else jobs.assert_identical
    assert_same(variables, jobs.variables(uninterrupted_run, last_step))
    assert (variables["global_step"], variables["examples_seen"]) == (last_step, last_step * 16)
    records = jobs.metrics_but_times(run)
    assert [record["step"] for record in records] == list(range(5, last_step + 1, 5))
    assert towers or records == jobs.metrics_but_times(uninterrupted_run)
    for name in ("examples_per_sec", "total_loss"):
        points = jobs.events(run).Scalars(name)
        assert [event.step for event in points] == list(range(5, last_step + 1, 5))
    np.testing.assert_allclose([event.value for event in points], [record["loss"] for record in records], rtol=1e-6)


def test_a_finished_run_started_again_is_left_as_it_is(toy_run, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(toy_run, directory)
    (directory / "notes.txt").write_text("mine")
    before = jobs.contents(directory)
    curves = [(event.step, event.value) for event in jobs.events(directory).Scalars("total_loss")]
    result = jobs.train_toy(directory, max_steps=40)
    assert (result.step, result.loss) == (40, None)
    assert "Step 40 was reached before; nothing to do." in capsys.readouterr().out
    after = jobs.contents(directory)
    found, old = (json.loads(content.pop(directory / "result.json")) for content in (after, before))
    assert found == old | {"started": found["started"]} and before.pop(directory / "run.json")
    assert before.items() <= after.items()
    assert [(event.step, event.value) for event in jobs.events(directory).Scalars("total_loss")] == curves
