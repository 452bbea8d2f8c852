"""Evaluations during training: at the steps asked for, also of training examples, and none is lost or done twice."""

import dataclasses
import re

import element_workloads
import jobs
import numpy as np
import pytest
import toy_workload

from tower_train import errors
from tower_train.config import EvaluateOptions
from tower_train.inference import saved_run
from tower_train.run import evaluations
from tower_train.workload import DataRequest


def precision(train_dir, split, indices=slice(None)):
    """Of the toy workload on examples of a split, in numpy."""
    features, labels = element_workloads.arrays(split)
    predicted = np.argmax(jobs.toy_logits(jobs.variables(train_dir), features[indices], ""), axis=1)
    return np.mean(predicted == labels[indices])


def test_each_evaluation_looks_at_a_sample_of_the_training_examples_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluations, "TRAINING_EXAMPLES", 30)
    sample = np.sort(np.random.default_rng(0).choice(96, 30, replace=False))
    options = dict(max_steps=20, eval_every_steps=10, eval_at_end=True, save_every_steps=5, keep_checkpoints=1)
    load = lambda request: dataclasses.replace(toy_workload.load(request), notice=f"{request.split}: less")  # noqa: E731
    workload = dataclasses.replace(toy_workload.WORKLOAD, examples=load)
    jobs.train_small(tmp_path, workload=workload, keep_best=True, **options)
    found = jobs.read_json(tmp_path, "result.json")
    train, test = found["train_evaluation"], found["evaluation"]
    assert (train["num_examples"], train["data"], test["num_examples"]) == (30, "toy train", 50)
    mean, other = train["metrics"]["precision @ 1"]["mean"], test["metrics"]["precision @ 1"]["mean"]
    assert mean == pytest.approx(precision(tmp_path, "train", sample))
    above = "above" if mean >= other else "below"
    line = f"on 30 training examples: precision @ 1 = {mean:.3f} ({abs(mean - other):.3f} {above}), loss = "
    lines = capsys.readouterr().out.splitlines()
    assert any(each.startswith(line) for each in lines)
    assert lines.count("*** test: less") == 1
    flattering = "*** The best checkpoint is chosen on the test examples, which flatters it"
    assert any(each.startswith(flattering) for each in lines)
    for name in ("train precision @ 1", "precision @ 1"):
        assert [event.step for event in jobs.events(tmp_path / "eval").Scalars(name)] == [10, 20]


def test_a_sample_of_examples_in_an_order_of_their_own_are_the_first():
    examples = element_workloads.IN_ORDER.examples(DataRequest("train"))
    sample, (features, _) = examples.sample(30), element_workloads.arrays("train")
    assert sample.num_examples == 30 and examples.sample(1000).num_examples == 96
    np.testing.assert_array_equal(sample.first(99)[0], features[:30])
    assert sum(1 for _ in sample.elements().take(99)) == 30


def test_the_last_step_is_evaluated_where_that_is_asked_for_and_no_run_that_is_stopped_before(tmp_path, capsys):
    options = dict(max_steps=7, eval_every_steps=5)
    jobs.train_small(tmp_path, **options)
    assert jobs.read_json(tmp_path, "result.json")["evaluation"]["step"] == 5
    assert "Result:" not in capsys.readouterr().out
    options |= dict(max_steps=9, eval_at_end=True)
    assert jobs.train_small(tmp_path, {1: lambda: True}, **options).step == 8
    assert jobs.read_json(tmp_path, "result.json")["evaluation"]["step"] == 5
    jobs.train_small(tmp_path, **options)
    result = jobs.read_json(tmp_path, "result.json")
    mean = result["evaluation"]["metrics"]["precision @ 1"]["mean"]
    assert (result["evaluation"]["step"], mean) == (9, pytest.approx(precision(tmp_path, "test")))
    assert re.search(
        rf"\nResult:   precision @ 1 = {mean:.3f} .*, after {result['training_secs']:.1f} s of training\n",
        capsys.readouterr().out,
    )
    assert 0 < result["training_secs"] < result["seconds"]


def test_what_chooses_looks_at_validation_examples_and_the_end_at_test_examples_too(tmp_path, capsys):
    options = dict(validation_fraction=0.2, max_steps=20, eval_every_steps=10, keep_best=True, eval_at_end=True)
    jobs.train_small(tmp_path, **options)
    found = jobs.read_json(tmp_path, "result.json")
    assert [found[name]["num_examples"] for name in ("validation", "evaluation", "train_evaluation")] == [19, 50, 77]
    aside = np.sort(np.random.default_rng(0).permutation(96)[:19])
    value = precision(tmp_path, "train", aside)
    assert found["validation"]["metrics"]["precision @ 1"]["mean"] == pytest.approx(value)
    assert jobs.read_json(tmp_path, "best.json")["last"]["value"] == pytest.approx(value)
    assert found["evaluation"]["metrics"]["precision @ 1"]["mean"] == pytest.approx(precision(tmp_path, "test"))
    steps = [
        [event.step for event in jobs.events(tmp_path / name).Scalars("precision @ 1")]
        for name in ("eval-validation", "eval")
    ]
    assert steps == [[10, 20], [20]] and "flatters" not in capsys.readouterr().out
    [evaluation] = saved_run.evaluate_run(EvaluateOptions(train_dir=str(tmp_path), split="validation"))
    assert evaluation.metrics["precision @ 1"].mean == pytest.approx(value) and evaluation.num_examples == 19
    with pytest.raises(errors.RunError, match="--validation_fraction was 0.2, now 0.0"):
        jobs.train_small(tmp_path, max_steps=30)
