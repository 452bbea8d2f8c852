"""Of few classes a matrix, of many the most frequent mistakes."""

import collections
import functools

import jobs
import numpy as np
import pytest
import toy_workload

from tower_train import EvaluateOptions, Examples, Workload, evaluate, evaluate_run, train
from tower_train.inference import evaluator, report

CLASSES = 300


def counted(labels, predictions):
    return collections.Counter(zip(labels.tolist(), predictions.tolist(), strict=True))


def drawn(classes, count, seed=0):
    """Labels and predictions among a few classes, so that pairs occur several times."""
    rng = np.random.default_rng(seed)
    return rng.choice(classes, 20)[rng.integers(0, 20, [2, count])]


@pytest.mark.parametrize("classes", [1, 3, 200])
def test_few_classes_have_a_matrix(classes):
    labels, predictions = drawn(classes, 5000)
    expected = np.zeros([classes, classes], int)
    np.add.at(expected, (labels, predictions), 1)
    assert evaluator.confusion_matrix(counted(labels, predictions), classes) == expected.tolist()


@pytest.mark.parametrize("classes", [201, 100_000])
def test_many_classes_have_their_most_frequent_mistakes(classes):
    labels, predictions = drawn(classes, 5000)
    names = [f"class-{i}" for i in range(classes)]
    confused = evaluator.most_confused(counted(labels, predictions), names)
    wrong = labels != predictions
    pairs, counts = np.unique(np.stack([labels, predictions])[:, wrong], axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:100]
    assert [(pair.true, pair.predicted, pair.count) for pair in confused] == [
        (f"class-{pairs[0, i]}", f"class-{pairs[1, i]}", counts[i]) for i in order
    ]


def many(request):
    labels = np.arange(1200) % CLASSES
    features = np.random.default_rng(0).normal(labels[:, np.newaxis] % 5, 1.0, [1200, 4]).astype(np.float32)
    return Examples.from_arrays("many", features, labels, [f"name {i}" for i in range(CLASSES)])


WORKLOAD = Workload("many", many, lambda features, training: toy_workload.layer("logits", features, CLASSES))


def test_training_and_evaluation_keep_and_print_pairs(command, tmp_path, monkeypatch):
    train(WORKLOAD, WORKLOAD.config(train_dir=str(tmp_path), max_steps=5, batch_size=16, eval_at_end=True))
    kept = jobs.read_json(tmp_path, "result.json")["evaluation"]
    assert (kept["confusion"], kept["class_names"], len(kept["most_confused"])) == (None, [], 100)
    weights = {name.removesuffix("/ExponentialMovingAverage"): value for name, value in jobs.variables(tmp_path).items()
               if name.endswith("/ExponentialMovingAverage")}  # fmt: skip
    features = np.random.default_rng(0).normal((np.arange(1200) % CLASSES)[:, np.newaxis] % 5, 1.0, [1200, 4])
    logits = features.astype(np.float32) @ weights["logits/weights"] + weights["logits/biases"]
    labels, predicted = np.arange(1200) % CLASSES, np.argmax(logits, axis=1)
    first = kept["most_confused"][0]
    pairs = [(f"name {i}", f"name {j}") for i, j in zip(labels, predicted, strict=True)]
    assert first["count"] == pairs.count((first["true"], first["predicted"]))
    assert (tmp_path / "result.json").stat().st_size < 50_000
    [found] = evaluate_run(EvaluateOptions(train_dir=str(tmp_path)), WORKLOAD)
    assert jobs.json_like(found.as_dict()["most_confused"]) == kept["most_confused"]

    monkeypatch.setattr(toy_workload, "WORKLOAD", WORKLOAD)
    run = functools.partial(command, evaluate)
    status, stdout, stderr = run(f"--train_dir={tmp_path}", "--workload=toy_workload")
    assert (status, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[4] == "most confused (examples, true class -> predicted class)"
    assert lines[5] == f"{first['count']:>5}  {first['true']} -> {first['predicted']}"
    assert lines[5:] == report.most_confused_lines(found.most_confused)[1:] and len(lines) == 25
