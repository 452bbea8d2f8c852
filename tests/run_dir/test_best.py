"""--keep_best, --stop_after_no_gain_epochs, and the comparison with training examples."""

import dataclasses
import os

import element_workloads
import jobs
import numpy as np
import pytest

from tower_train import Config, EvaluateOptions, errors, evaluate_run
from tower_train.config import RunOptions
from tower_train.inference import evaluator, report, serving

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
        metric = evaluator.Metric(PRECISION[found.step])
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


@pytest.mark.parametrize("stops", [[40], [12, 33, 40]])
def test_a_better_one_takes_its_place_also_after_restarts(stops, scripted, tmp_path):
    for max_steps in stops:
        jobs.train_toy(tmp_path, keep_best=True, **OPTIONS | {"max_steps": max_steps})
    assert kept(tmp_path) == files_of(30)
    assert jobs.read_json(tmp_path, "best.json") == {
        "metric": "precision @ 1",
        "best": {"step": 30, "examples": 480, "value": 0.7},
        "last": {"step": 40, "examples": 640, "value": 0.1},
    }


@pytest.mark.parametrize("stops", [[40], [12, 23, 40]])
def test_a_run_without_gain_stops_early_also_after_restarts(stops, scripted, tmp_path, capsys):
    """After step 10 nothing is better until step 30; at step 25, two epochs and a half are over."""
    options = OPTIONS | {"stop_after_no_gain_epochs": 2.0}
    for max_steps in stops:
        result = jobs.train_toy(tmp_path, **options | {"max_steps": max_steps})
    assert (result.step, result.stopped_by) == (25, "no gain for 2 epochs")
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == "no gain for 2 epochs"
    assert "Resume:" not in capsys.readouterr().out.rpartition("Stopped by no gain for 2 epochs at step 25 of 40")[2]
    assert not (tmp_path / "best").exists()
    assert jobs.train_toy(tmp_path, **options).step == 25
    assert "nothing to do. A greater --stop_after_no_gain_epochs trains on." in capsys.readouterr().out
    options["stop_after_no_gain_epochs"] = 3
    assert jobs.train_toy(tmp_path, **options).stopped_by == "last step"


@pytest.mark.parametrize("step", [10, 25])
def test_a_run_killed_before_its_evaluation_does_it_first_of_all(step, scripted, tmp_path):
    options = OPTIONS | dict(keep_best=True, stop_after_no_gain_epochs=2.0)
    jobs.train_toy(tmp_path / "whole", **options)
    scripted.add(step)
    with pytest.raises(KeyboardInterrupt):
        jobs.train_toy(tmp_path / "run", **options)
    assert jobs.saved_step(tmp_path / "run") == step
    scripted.clear()
    jobs.train_toy(tmp_path / "run", **options)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    assert jobs.read_json(tmp_path / "run", "best.json") == jobs.read_json(tmp_path / "whole", "best.json")
    assert jobs.saved_step(tmp_path / "run") == jobs.saved_step(tmp_path / "whole")


def test_a_best_checkpoint_that_cannot_be_kept_ends_no_run(scripted, tmp_path, capsys):
    (tmp_path / "best").write_text("mine")
    result = jobs.train_toy(tmp_path, keep_best=True, **OPTIONS | {"max_steps": 10})
    assert result.stopped_by == "last step"
    assert "*** The best checkpoint cannot be kept (" in capsys.readouterr().out
    assert (tmp_path / "best").read_text() == "mine"


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


def test_both_need_evaluations_and_best_is_no_watch():
    for options in ({"keep_best": True}, {"stop_after_no_gain_epochs": 1}):
        with pytest.raises(errors.ConfigError, match=f"--{next(iter(options))} needs .* with --eval_every_steps."):
            Config(**options)
    with pytest.raises(errors.ConfigError, match="--best and --watch exclude each other"):
        EvaluateOptions(train_dir="x", best=True, watch=True)


def test_an_early_stop_is_no_failure_of_the_command(tmp_path):
    """A rate of next to nothing: the precision stays what it was at the first evaluation."""
    words = jobs.toy_flags(tmp_path, learning_rate=1e-9, eval_every_steps=6, stop_after_no_gain_epochs=1, max_steps=90)
    done = jobs.command("tower_train", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert jobs.saved_step(tmp_path) == 12


def precision(train_dir, indices):
    """Of the toy workload's network on training examples, in numpy, on the moving averages."""
    weights = jobs.variables(train_dir)
    features, labels = element_workloads.arrays("train")
    outputs = features[indices]
    for layer in ("hidden", "softmax_linear"):
        outputs = np.maximum(outputs, 0 if layer == "softmax_linear" else -np.inf)
        outputs = outputs @ weights[f"{layer}/weights/ExponentialMovingAverage"]
        outputs += weights[f"{layer}/biases/ExponentialMovingAverage"]
    return np.mean(np.argmax(outputs, axis=1) == labels[indices])


def test_each_evaluation_looks_at_training_examples_too(tmp_path, capsys):
    jobs.train_toy(tmp_path, max_steps=20, eval_every_steps=10, keep_checkpoints=1)
    found = jobs.read_json(tmp_path, "result.json")
    train, test = found["train_evaluation"], found["evaluation"]
    assert (train["num_examples"], train["data"], test["num_examples"]) == (96, "toy train", 50)
    mean, other = train["metrics"]["precision @ 1"]["mean"], test["metrics"]["precision @ 1"]["mean"]
    assert mean == pytest.approx(precision(tmp_path, np.arange(96)))
    above = "above" if mean >= other else "below"
    line = f"on 96 training examples: precision @ 1 = {mean:.3f} ({abs(mean - other):.3f} {above})"
    assert line in capsys.readouterr().out.splitlines()
    curve = jobs.events(tmp_path / "eval").Scalars("train precision @ 1")
    assert [event.step for event in curve] == [10, 20]


@pytest.mark.parametrize("count", [1, 30])
def test_a_sample_is_the_same_each_time(count, tmp_path):
    jobs.train_toy(tmp_path, max_steps=10, eval_every_steps=10, train_eval_examples=count)
    chosen = np.sort(np.random.default_rng(0).choice(96, count, replace=False))
    found = jobs.read_json(tmp_path, "result.json")["train_evaluation"]
    assert found["num_examples"] == count
    assert found["metrics"]["precision @ 1"]["mean"] == pytest.approx(precision(tmp_path, chosen))


def test_a_dataset_in_an_order_of_its_own_is_sampled_too(tmp_path):
    jobs.train_toy(
        tmp_path, workload=element_workloads.PIPELINE, max_steps=10, eval_every_steps=10, train_eval_examples=40
    )
    assert jobs.read_json(tmp_path, "result.json")["train_evaluation"]["num_examples"] == 40


def found(mean, count, is_proportion=True):
    interval = evaluator.wilson_interval(mean * count, count) if is_proportion else ()
    metrics = {"precision @ 1": evaluator.Metric(mean, *interval), "other": evaluator.Metric(0.0)}
    return evaluator.Evaluation(1, "data", count, "raw weights", metrics, None, (), 0.0)


def test_a_warning_when_they_part_beyond_chance():
    warning = report.overfitting(found(0.95, 1000), found(0.8, 1000))
    assert warning.startswith("*** precision @ 1 is 0.950 on training examples and 0.800 on the test examples:")
    assert report.overfitting(found(0.95, 1000), found(0.88, 1000)) is None, "not by much"
    assert report.overfitting(found(0.95, 20), found(0.8, 20)) is None, "by chance"
    assert report.overfitting(found(0.8, 1000), found(0.95, 1000)) is None
    assert report.overfitting(found(0.95, 1000, False), found(0.2, 1000, False)) is None, "no proportions"


def test_the_warning_comes_once_a_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "overfitting", lambda *_: "*** they part")
    jobs.train_toy(tmp_path, max_steps=20, eval_every_steps=10)
    assert capsys.readouterr().out.count("*** they part") == 1
