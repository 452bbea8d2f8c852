"""--keep_best and --early_stopping_patience_epochs."""

import dataclasses
import os

import jobs
import pytest

from tower_train import EvaluateOptions, errors, evaluate_run
from tower_train.config import RunOptions
from tower_train.inference import evaluator, serving

PRECISION = {5: 0.2, 10: 0.6, 15: 0.4, 20: 0.6, 25: 0.5, 30: 0.7, 35: 0.65, 40: 0.1}
# 16 examples a step and 96 in an epoch: two epochs are 12 steps.
OPTIONS = dict(eval_every_steps=5, save_every_steps=0, keep_checkpoints=2, train_eval_examples=0, max_steps=40)


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations find the precision of PRECISION; those at the steps in the returned set raise KeyboardInterrupt."""
    killed_at = set()
    evaluate = evaluator.Evaluator.evaluate

    def evaluate_by_the_script(self, path):
        found = evaluate(self, path)
        if found.step in killed_at:
            raise KeyboardInterrupt
        metric = evaluator.Metric(PRECISION[found.step], mode="max")
        return dataclasses.replace(found, metrics={"precision @ 1": metric, "other": evaluator.Metric(1 - metric.mean)})

    monkeypatch.setattr(evaluator.Evaluator, "evaluate", evaluate_by_the_script)
    return killed_at


def kept(train_dir):
    return sorted(os.listdir(train_dir / "best"))


def files_of(step):
    return [f"model.ckpt-{step}.data-00000-of-00001", f"model.ckpt-{step}.index"]


def test_the_best_checkpoint_is_kept_beyond_the_rotation_and_found_again(scripted, tmp_path, capsys):
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / files_of(3)[0]).write_text("half of a checkpoint")
    jobs.train_toy(tmp_path / "run", keep_best=True, **OPTIONS | {"max_steps": 25})
    assert jobs.saved_steps(tmp_path / "run") == [20, 25]
    assert kept(tmp_path / "run") == files_of(10), "the first of equals is the best"
    assert f"best so far, kept in {tmp_path}/run/best" in capsys.readouterr().out
    jobs.train_toy(tmp_path / "whole", keep_best=True, **OPTIONS | {"max_steps": 10})
    jobs.assert_identical(jobs.variables(tmp_path / "run" / "best", 10), jobs.variables(tmp_path / "whole"))
    options = EvaluateOptions(train_dir=str(tmp_path / "run"), best=True)
    assert [found.step for found in evaluate_run(options)] == [10]
    built, session = serving.open_run(RunOptions(train_dir=str(tmp_path / "run"), best=True))
    with session:
        served = session.run(built.restored)
    whole = jobs.variables(tmp_path / "whole")
    jobs.assert_identical(served, {name: whole[name] for name in served})


def test_a_better_one_takes_its_place_also_after_restarts(scripted, tmp_path):
    for max_steps in (12, 33, 40):
        jobs.train_toy(tmp_path, keep_best=True, **OPTIONS | {"max_steps": max_steps})
    assert kept(tmp_path) == files_of(30)
    assert jobs.read_json(tmp_path, "best.json") == {
        "metric": "precision @ 1",
        "mode": "max",
        "best": {"step": 30, "examples": 480, "value": 0.7},
        "last": {"step": 40, "examples": 640, "value": 0.1},
    }


def test_a_run_without_gain_stops_early_also_after_restarts(scripted, tmp_path, capsys):
    """After step 10 nothing is better until step 30; at step 25, two epochs and a half are over."""
    options = OPTIONS | {"early_stopping_patience_epochs": 2.0}
    for max_steps in (12, 23, 40):
        result = jobs.train_toy(tmp_path, **options | {"max_steps": max_steps})
    assert (result.step, result.stopped_by) == (25, "no gain for 2 epochs")
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == "no gain for 2 epochs"
    assert "Resume:" not in capsys.readouterr().out.rpartition("Stopped by no gain for 2 epochs at step 25 of 40")[2]
    assert not (tmp_path / "best").exists()
    assert jobs.train_toy(tmp_path, **options).step == 25
    assert "nothing to do. A greater --early_stopping_patience_epochs trains on." in capsys.readouterr().out
    options["early_stopping_patience_epochs"] = 3
    assert jobs.train_toy(tmp_path, **options).stopped_by == "last step"


def test_a_run_killed_before_its_evaluation_does_it_first_of_all(scripted, tmp_path):
    """Killed at the best, and where there is no gain for long enough."""
    options = OPTIONS | dict(keep_best=True, early_stopping_patience_epochs=2.0)
    jobs.train_toy(tmp_path / "whole", **options)
    for step in (10, 25):
        scripted.add(step)
        with pytest.raises(KeyboardInterrupt):
            jobs.train_toy(tmp_path / "run", **options)
        assert jobs.saved_step(tmp_path / "run") == step
        scripted.clear()
    jobs.train_toy(tmp_path / "run", **options)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    assert jobs.read_json(tmp_path / "run", "best.json") == jobs.read_json(tmp_path / "whole", "best.json")
    assert jobs.saved_step(tmp_path / "run") == jobs.saved_step(tmp_path / "whole") == 25


def test_a_best_checkpoint_that_cannot_be_kept_ends_no_run(scripted, tmp_path, capsys):
    (tmp_path / "best").write_text("mine")
    result = jobs.train_toy(tmp_path, keep_best=True, **OPTIONS | {"max_steps": 10})
    assert result.stopped_by == "last step"
    assert "*** The best checkpoint cannot be kept (" in capsys.readouterr().out
    assert (tmp_path / "best").read_text() == "mine"


def test_a_link_to_the_checkpoints_of_another_run_leaves_them_alone(scripted, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "other" / files_of(3)[1]).write_text("another run's")
    (tmp_path / "run" / "best").symlink_to(tmp_path / "other")
    jobs.train_toy(tmp_path / "run", keep_best=True, **OPTIONS | {"max_steps": 10})
    assert "best is a symbolic link). The run goes on." in capsys.readouterr().out
    assert os.listdir(tmp_path / "other") == [files_of(3)[1]]


def test_a_file_system_without_links_gets_copies(scripted, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    jobs.train_toy(tmp_path, keep_best=True, **OPTIONS | {"max_steps": 10})
    assert kept(tmp_path) == files_of(10)
    jobs.assert_identical(jobs.variables(tmp_path / "best", 10), jobs.variables(tmp_path, 10))


def test_without_a_kept_checkpoint_best_is_refused(toy_run):
    with pytest.raises(errors.RunError, match="best holds no checkpoint. Train with --keep_best"):
        list(evaluate_run(EvaluateOptions(train_dir=str(toy_run), best=True)))


def test_best_is_no_watch():
    with pytest.raises(errors.ConfigError, match="--best and --watch exclude each other"):
        EvaluateOptions(train_dir="x", best=True, watch=True)


def test_an_early_stop_is_no_failure_of_the_command(tmp_path):
    """A rate of next to nothing: the precision stays what it was at the first evaluation."""
    words = jobs.toy_flags(
        tmp_path, learning_rate=1e-9, eval_every_steps=6, early_stopping_patience_epochs=1, max_steps=90
    )
    done = jobs.command("tower_train", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert jobs.saved_step(tmp_path) == 12
