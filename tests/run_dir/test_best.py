"""--keep_best and --early_stopping_patience_epochs."""

import dataclasses
import json
import os
import types

import jobs
import numpy as np
import pytest

from tower_train import EvaluateOptions, errors, evaluate_run
from tower_train.config import Config, RunOptions
from tower_train.inference import evaluator, serving
from tower_train.run import evaluations
from tower_train.run_dir import best, directory

PRECISION = {5: 0.2, 10: 0.6, 15: 0.4, 20: 0.6, 25: 0.5, 30: 0.7, 35: 0.65, 40: 0.1}
# 16 examples a step and 96 in an epoch: two epochs are 12 steps.
OPTIONS = dict(eval_every_steps=5, save_every_steps=0, keep_checkpoints=2, max_steps=40)


@pytest.fixture(scope="module", autouse=True)
def shared_evaluators():
    """The runs here are of one network and evaluate it by the same graphs, which take half of a run's time to build."""
    made, new = {}, evaluator.Evaluator

    def find(workload, examples, *arguments):
        if examples.name not in made:
            made[examples.name] = new(workload, examples, *arguments)
        return made[examples.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluations, "Evaluator", find)
        patch.setattr(new, "close", lambda self: None)
        yield


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations find the precision of PRECISION; those at the steps in the returned set raise KeyboardInterrupt."""
    killed_at = set()
    evaluate = evaluator.Evaluator.evaluate

    def evaluate_by_the_script(*args):
        found = evaluate(*args)
        if found.step in killed_at:
            raise KeyboardInterrupt
        metric = evaluator.Metric(PRECISION[found.step], mode="max")
        return dataclasses.replace(found, metrics={"precision @ 1": metric, "other": evaluator.Metric(1 - metric.mean)})

    monkeypatch.setattr(evaluator.Evaluator, "evaluate", evaluate_by_the_script)
    return killed_at


def kept(train_dir):
    return sorted(os.listdir(train_dir / "best"))


def list_files(step):
    return [f"model.ckpt-{step}.data-00000-of-00001", f"model.ckpt-{step}.index"]


def test_the_best_checkpoint_is_kept_beyond_the_rotation_and_found_again(scripted, toy_run, tmp_path, capsys):
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / list_files(3)[0]).write_text("half of a checkpoint")
    jobs.train_small(tmp_path / "run", keep_best=True, **OPTIONS | {"max_steps": 25})
    assert jobs.saved_steps(tmp_path / "run") == [20, 25]
    assert kept(tmp_path / "run") == list_files(10), "the first of equals is the best"
    assert f"best so far, kept in {tmp_path}/run/best" in capsys.readouterr().out
    jobs.train_small(tmp_path / "whole", keep_best=True, **OPTIONS | {"max_steps": 10})
    jobs.assert_identical(jobs.variables(tmp_path / "run" / "best", 10), jobs.variables(tmp_path / "whole"))
    options = EvaluateOptions(train_dir=str(tmp_path / "run"), best=True)
    with pytest.raises(errors.RunError, match="best holds no checkpoint. Train with --keep_best"):
        next(evaluate_run(dataclasses.replace(options, train_dir=str(toy_run))))
    assert [found.step for found in evaluate_run(options)] == [10]
    built, session = serving.open_run(RunOptions(train_dir=str(tmp_path / "run"), best=True))
    with session:
        served = session.run(built.restored)
    whole = jobs.variables(tmp_path / "whole")
    jobs.assert_identical(served, {name: whole[name] for name in served})


def test_a_run_without_gain_stops_early_and_a_better_one_takes_its_place_also_after_restarts(
    scripted, tmp_path, capsys
):
    options = OPTIONS | {"early_stopping_patience_epochs": 2.0, "keep_best": True}
    for max_steps in (23, 40):
        result = jobs.train_small(tmp_path, **options | {"max_steps": max_steps})
    assert (result.step, result.stopped_by) == (25, "no gain")
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == "no gain"
    closing = capsys.readouterr().out.rpartition("Stopped by no gain at step 25 of 40")[2]
    best = f"Best:     precision @ 1 = 0.600 on test examples at step 10, kept in {tmp_path}/best"
    assert f"{best}\nResult:   precision @ 1 = 0.500 on test examples at step 25, after" in closing
    assert f"--train_dir={tmp_path} --best\n" in closing and "Resume:" not in closing
    assert jobs.train_small(tmp_path, **options).step == 25
    assert "nothing to do. A larger --early_stopping_patience_epochs trains on." in capsys.readouterr().out
    assert kept(tmp_path) == list_files(10)
    options["early_stopping_patience_epochs"] = 3
    assert jobs.train_small(tmp_path, **options).stopped_by == "last step"
    assert kept(tmp_path) == list_files(30)
    assert jobs.read_json(tmp_path, "best.json") == {
        "metric": "precision @ 1",
        "mode": "max",
        "best": {"step": 30, "examples": 480, "value": 0.7},
        "last": {"step": 40, "examples": 640, "value": 0.1},
    }


def test_a_run_killed_before_its_evaluation_does_it_first_of_all(scripted, tmp_path):
    options = OPTIONS | dict(keep_best=True, early_stopping_patience_epochs=2.0)
    for step in (10, 25):
        scripted.add(step)
        with pytest.raises(KeyboardInterrupt):
            jobs.train_small(tmp_path / "run", **options)
        assert jobs.saved_step(tmp_path / "run") == step
        scripted.clear()
    jobs.train_small(tmp_path / "run", **options)
    assert kept(tmp_path / "run") == list_files(10) and jobs.saved_step(tmp_path / "run") == 25
    found = jobs.read_json(tmp_path / "run", "best.json")
    assert (found["best"]["step"], found["last"]["step"]) == (10, 25)


def test_a_best_checkpoint_that_cannot_be_kept_ends_no_run(scripted, tmp_path, capsys):
    (tmp_path / "best").write_text("mine")
    result = jobs.train_small(tmp_path, keep_best=True, **OPTIONS | {"max_steps": 10})
    assert result.stopped_by == "last step"
    assert "*** The best checkpoint cannot be kept (" in capsys.readouterr().out
    assert (tmp_path / "best").read_text() == "mine"


def test_the_best_begins_anew_once_it_is_to_be_kept(tmp_path, capsys):
    """All evaluations are equal: else the first start's would stay the best, without a checkpoint."""
    options = dict(learning_rate=1e-30, eval_every_steps=5, early_stopping_patience_epochs=100)
    jobs.train_small(tmp_path, max_steps=10, **options)
    jobs.train_small(tmp_path, max_steps=20, keep_best=True, **options)
    told = capsys.readouterr().out
    assert "*** The best checkpoint until now, of step 5, was not kept. It begins anew." in told
    assert kept(tmp_path) == list_files(10), "which the second start begins with"


def test_a_run_that_has_ended_early_stays_so_if_another_metric_chooses(tmp_path, capsys):
    options = dict(OPTIONS, learning_rate=1e-30, max_steps=400, early_stopping_patience_epochs=1)
    step = jobs.train_small(tmp_path, **options).step
    content = jobs.read_json(tmp_path, "best.json")
    (tmp_path / "best.json").write_text(json.dumps(content | {"metric": "another"}))
    result = jobs.train_small(tmp_path, **options)
    assert (result.step, result.stopped_by) == (step, "no gain") and step < 400
    assert "*** Until now the max of another was the best" in capsys.readouterr().out


def opened(folder, step=0, keep_best=False, patience=5):
    """Of epochs of 16 examples, and steps of as many."""
    options = dict(keep_best=keep_best, early_stopping_patience_epochs=patience, eval_every_steps=1, batch_size=16)
    return best.Best(directory.RunDirectory(folder), Config(**options), 16, step)


def note(compared, step, value, mode="max"):
    compared.note(types.SimpleNamespace(step=step, metrics={"m": evaluator.Metric(value, mode=mode)}), "")


def test_an_evaluation_of_a_step_that_was_lost_does_not_count_until_it_is_done_again(tmp_path):
    """The newest checkpoint may be damaged: the run resumes at the one before, of step 20."""
    assert not opened(tmp_path, keep_best=True).is_kept
    compared = opened(tmp_path)
    for step in (20, 25):
        note(compared, step, 0.5)
    resumed = [opened(tmp_path, step) for step in (0, 20, 25, 30)]
    assert compared.is_over and not any(each.is_kept for each in resumed)
    assert [each.is_over for each in resumed] == [False, False, True, True]
    assert [each.is_news for each in resumed] == [False, False, False, True]


@pytest.mark.parametrize(
    ("mode", "values", "best_steps"),
    [
        ("max", [np.nan, 0.2, np.nan, 0.4, 0.3], [1, 2, 2, 4, 4]),
        ("min", [np.nan, 0.5, np.nan, 0.7, 0.1], [1, 2, 2, 2, 5]),
    ],
)
def test_the_best_is_the_highest_or_the_lowest_and_nan_the_worst(mode, values, best_steps, tmp_path):
    compared, found = opened(tmp_path, patience=1), []
    for step, value in enumerate(values, 1):
        note(compared, step, value, mode)
        found.append(jobs.read_json(tmp_path, "best.json")["best"]["step"])
    assert found == best_steps


def test_it_begins_anew_if_other_values_are_the_best(tmp_path):
    note(opened(tmp_path), 5, 9.0, "max")
    compared = opened(tmp_path, 5, patience=1)
    assert not compared.is_news
    [line] = compared.compare_by("m", "min")
    assert line == "*** Until now the max of m was the best, now the min of m is. It begins anew." and compared.is_news
    note(compared, 5, 0.5, "min")
    assert not compared.compare_by("m", "min") and jobs.read_json(tmp_path, "best.json")["mode"] == "min"
