"""The same command gives the same run, also where it was killed at any moment and started again."""

import dataclasses
import json
import math
import re
import shutil

import jobs
import numpy as np
import toy_workload

from tower_train import Config, train


def test_the_same_command_gives_the_same_run_to_the_last_bit(cifar10_run, cifar10_command, tmp_path):
    process = jobs.command("tower_train", *cifar10_command, f"--train_dir={tmp_path / 'again'}")
    assert process.returncode == 0, process.stderr
    first, again = cifar10_run[0], tmp_path / "again"
    assert jobs.metrics_but_times(again) == jobs.metrics_but_times(first)
    for step in (12, 24):
        jobs.assert_identical(jobs.variables(again, step), jobs.variables(first, step))


def test_the_result_is_returned_and_written(tmp_path):
    result = jobs.train_small(tmp_path / "run", max_steps=12, log_every_steps=4)
    assert result.stopped_by == "last step"
    assert result == dataclasses.replace(
        result,
        train_dir=str(tmp_path / "run"),
        step=12,
        data="toy train",
        notice=None,
        checkpoint=str(tmp_path / "run" / "model.ckpt-12"),
        loss=jobs.metrics(tmp_path / "run")[-1]["loss"],
    )
    assert 0 < result.examples_per_sec < math.inf and result.seconds > 0
    started = jobs.read_json(tmp_path / "run", "run.json")["started"]
    assert jobs.read_json(tmp_path / "run", "result.json") == result.as_dict() | {"started": started}


def test_a_run_without_a_train_dir_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(toy_workload.WORKLOAD, Config(max_steps=2, **jobs.SMALL))
    assert re.fullmatch(r"runs/toy-\d{8}-\d{6}", result.train_dir)
    assert jobs.saved_steps(tmp_path / result.train_dir) == [2]
    jobs.train_small(result.train_dir, max_steps=3)
    assert jobs.saved_steps(tmp_path / result.train_dir) == [2, 3]


def test_another_last_step_tells_the_jump_of_a_rate_that_ends_there(tmp_path, capsys):
    options = dict(learning_rate=0.2, lr_schedule="cosine")
    jobs.train_small(tmp_path, {9: lambda: True}, max_steps=10, **options)
    jobs.train_small(tmp_path, max_steps=10, **options)
    assert "***" not in capsys.readouterr().out
    jobs.train_small(tmp_path, max_steps=20, **options)
    line = "*** The last step was 10 and is now 20. --lr_schedule=cosine stretches to it, so the learning rate jumps."
    assert line in capsys.readouterr().out


OPTIONS = dict(dtype="float64", seed=3, learning_rate=0.001, summary_every_steps=10)
LAST_STEP = 45


def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    """Killed before its first checkpoint and between two, and moved each time: with the variables of the other one, and
    with every step once in its log and in its curves; also with another tower count."""
    for name, then, save_every_steps, step in (("first", "second", 0, 12), ("second", "killed", 20, 33)):
        options = OPTIONS | dict(save_every_steps=save_every_steps, max_steps=40)
        jobs.train_toy(tmp_path / name, jobs.copy_after(step, tmp_path / name, tmp_path / then), **options)
        assert jobs.saved_steps(tmp_path / name)[:1] == [save_every_steps or 40]
        shutil.rmtree(tmp_path / name)
    assert jobs.logged_step(tmp_path / "killed") == 30
    jobs.train_toy(whole := tmp_path / "whole", max_steps=LAST_STEP, **OPTIONS)
    steps = list(range(5, LAST_STEP + 1, 5))
    for towers, assert_same in (({}, jobs.assert_identical), (dict(num_gpus=4, batch_size=4), jobs.assert_close)):
        run = shutil.copytree(tmp_path / "killed", tmp_path / f"run{len(towers)}")
        assert jobs.train_toy(run, max_steps=LAST_STEP, **OPTIONS | towers).step == LAST_STEP
        variables = jobs.variables(run, LAST_STEP)
        assert_same(variables, jobs.variables(whole, LAST_STEP))
        assert (variables["global_step"], variables["examples_seen"]) == (LAST_STEP, LAST_STEP * 16)
        records = jobs.metrics_but_times(run)
        assert [record["step"] for record in records] == steps
        assert towers or records == jobs.metrics_but_times(whole)
        for name in ("examples_per_sec", "total_loss"):
            points = jobs.events(run).Scalars(name)
            assert [event.step for event in points] == steps
        losses = [record["loss"] for record in records]
        np.testing.assert_allclose([event.value for event in points], losses, rtol=1e-6)


def test_a_finished_run_started_again_is_left_as_it_is(run, capsys):
    (run / "notes.txt").write_text("mine")
    before = jobs.contents(run)
    curves = [(event.step, event.value) for event in jobs.events(run).Scalars("total_loss")]
    result = jobs.train_toy(run, max_steps=40)
    assert (result.step, result.loss) == (40, None)
    assert "Step 40 was reached before; nothing to do." in capsys.readouterr().out
    after = jobs.contents(run)
    found, old = (json.loads(content.pop(run / "result.json")) for content in (after, before))
    assert found == old | {"started": found["started"]} and before.pop(run / "run.json")
    assert before.items() <= after.items()
    assert [(event.step, event.value) for event in jobs.events(run).Scalars("total_loss")] == curves
