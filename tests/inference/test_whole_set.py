"""Metrics of a whole set: keras.metrics and functions of all outputs, exact over any towers and an uneven end."""

import dataclasses

import element_workloads
import jobs
import keras
import numpy as np
import pytest
import toy_workload

from tower_train import EvaluateOptions, errors, evaluate_run


def spread(outputs, labels):
    return np.std(outputs[labels == 0])


def workload(*metrics, **changes):
    return dataclasses.replace(toy_workload.WORKLOAD, metrics=metrics, **changes)


def evaluate(run, *metrics, **changes):
    options = EvaluateOptions(train_dir=str(run), num_gpus=2, batch_size=7)  # 50 examples: the last batch is uneven
    [found] = evaluate_run(options, workload(*metrics, **changes))
    return found.metrics


def test_each_metric_is_that_of_all_examples_at_once(run):
    found = evaluate(run, SparseIoU(name="iou"), spread, SparseF1(name="f1"))
    features, labels = element_workloads.arrays("test")
    logits = jobs.toy_logits(jobs.variables(run), features)
    predicted = np.argmax(logits, axis=1)
    both, either, f1 = [], [], []
    for i in range(3):
        true, said = labels == i, predicted == i
        both.append(np.sum(true & said))
        either.append(np.sum(true | said))
        f1.append(2 * both[-1] / (np.sum(true) + np.sum(said)))
    assert list(found) == ["iou", "spread", "f1 one", "f1 two", "f1 three", "loss"]
    assert found["iou"].mean == pytest.approx(np.mean(np.divide(both, either)), rel=1e-5)
    assert found["spread"].mean == pytest.approx(np.std(logits[labels == 0]), rel=1e-5)
    assert [found[f"f1 {name}"].mean for name in toy_workload.CLASSES] == pytest.approx(f1, rel=1e-5)
    assert [found[name].mode for name in ("iou", "spread", "loss")] == ["max", None, "min"]


def loss(outputs, labels):
    return 7.0


def test_a_metric_by_the_name_of_the_loss_takes_its_place(run):
    assert evaluate(run, loss)["loss"].mean == 7


class SparseIoU(keras.metrics.MeanIoU):
    def __init__(self, name):
        super().__init__(num_classes=3, name=name, sparse_y_pred=False)


class SparseF1(keras.metrics.F1Score):
    """Of labels that are not one-hot."""

    def update_state(self, labels, outputs, sample_weight=None):
        super().update_state(np.eye(3)[labels], outputs)


def test_the_first_of_them_chooses(tmp_path):
    options = dict(num_gpus=1, max_steps=2, eval_every_steps=1, keep_best=True)
    jobs.train_toy(tmp_path, workload=workload(spread, mode={"spread": "min"}), **options)
    best = jobs.read_json(tmp_path, "best.json")
    assert (best["metric"], best["mode"]) == ("spread", "min")
    with pytest.raises(errors.ConfigError, match="not known whether a higher or a lower 'spread' is better"):
        jobs.train_toy(tmp_path / "unknown", workload=workload(spread), **options)


def test_mistakes_show_before_the_training(tmp_path):
    for metric, message in (
        (lambda outputs, labels: outputs, r"is of shape \[.*, 3\]. It must be a number, one for each class"),
        (keras.metrics.MeanIoU(3, name="iou"), r"'iou' fails on outputs \[.*, 3\] and labels \["),
    ):
        with pytest.raises(errors.GraphError, match=message):
            jobs.train_toy(tmp_path, workload=workload(metric), num_gpus=1, max_steps=2, eval_at_end=True)


def test_a_loss_that_does_not_take_an_evaluations_outputs_is_left_out_and_that_is_told(tmp_path, capsys):
    def inference(features, training):
        logits = toy_workload.network(features, training)
        return {"first": logits} if training else logits

    def loss(outputs, labels):
        return toy_workload.WORKLOAD.loss(outputs["first"], labels)

    made = workload(spread, loss=loss, inference=inference)
    jobs.train_toy(tmp_path, workload=made, num_gpus=1, max_steps=1, eval_at_end=True)
    found = jobs.read_json(tmp_path, "result.json")["evaluation"]["metrics"].keys()
    assert found == {"spread"}
