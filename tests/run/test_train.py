"""train: the same command gives the same run, and what comes back and lies in the train_dir is true."""

import dataclasses
import math
import re

import jobs
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


def test_another_seed_gives_another_run(toy_run, tmp_path):
    jobs.train_toy(tmp_path, max_steps=40, seed=1)
    losses = [[record["loss"] for record in jobs.metrics(directory)] for directory in (toy_run, tmp_path)]
    assert not set(losses[0]) & set(losses[1])


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
