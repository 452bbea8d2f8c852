"""Evaluation counts every test example once, on the weights it says, whatever the batches and towers; its command."""

import contextlib
import dataclasses
import json
import shutil
import types

import element_workloads
import jobs
import numpy as np
import pytest
import small_disk
import tensorflow as tf
import toy_workload

from tower_train import EvaluateOptions, errors, evaluate_run
from tower_train import evaluate as evaluate_command
from tower_train.inference import evaluator, report, saved_run
from tower_train.run_dir import checkpoint, directory


def evaluate(train_dir, workload=None, **options):
    [found] = evaluate_run(EvaluateOptions(train_dir=str(train_dir), **options), workload)
    return found


def confusion(labels, predicted):
    return [[int(np.sum((labels == i) & (predicted == j))) for j in range(3)] for i in range(3)]


def test_every_example_counts_once_on_the_weights_asked_for(run):
    features, labels = element_workloads.arrays("test")
    logits = [jobs.toy_logits(jobs.variables(run), features, suffix) for suffix in ("/ExponentialMovingAverage", "")]
    predicted = [np.argmax(each, axis=1) for each in logits]
    assert not np.array_equal(*predicted), "the run is to tell them apart"
    for raw, num_gpus, batch_size in ((False, 3, 7), (True, 4, 64)):
        found = evaluate(run, raw=raw, num_gpus=num_gpus, batch_size=batch_size)
        assert (found.step, found.weights) == (12, "raw weights" if raw else "moving averages")
        assert (found.num_examples, found.class_names) == (50, toy_workload.CLASSES)
        assert found.confusion == confusion(labels, predicted[raw])
        right = int(np.sum(predicted[raw] == labels))
        assert found.metrics["precision @ 1"].mean == pytest.approx(right / 50, abs=1e-12)
        losses = np.log(np.sum(np.exp(logits[raw]), axis=1)) - logits[raw][np.arange(50), labels]
        assert found.metrics["loss"].mean == pytest.approx(np.mean(losses), rel=1e-5)


def test_evaluation_takes_the_mean_of_the_logits_over_views_unless_told_not_to(tmp_path):
    """Of the features as they are, at weight 1/4, and with their signs turned, at 3/4; also during training."""
    workload = dataclasses.replace(
        toy_workload.WORKLOAD, test_time_augmentation=lambda features: [(0.25, features), (0.75, -features)]
    )
    jobs.train_toy(tmp_path, workload=workload, num_gpus=1, max_steps=12, eval_every_steps=12, learning_rate=0.05)
    during = jobs.read_json(tmp_path, "result.json")["evaluation"]
    found, single = (
        evaluate(tmp_path, workload, single_view=single, num_gpus=2, batch_size=7) for single in (False, True)
    )
    features, labels = element_workloads.arrays("test")
    plain, turned = (jobs.toy_logits(jobs.variables(tmp_path), sign * features) for sign in (1, -1))
    for evaluation, logits in ((found, 0.25 * plain + 0.75 * turned), (single, plain)):
        assert evaluation.confusion == confusion(labels, np.argmax(logits, axis=1))
        assert evaluation.several_views is (evaluation is found)
        line = report.evaluation_lines(evaluation)[0]
        assert line.endswith(", several views of each") is (evaluation is found)
    assert found.confusion != single.confusion
    result = jobs.read_json(tmp_path, "result.json")
    assert result["evaluation"] == json.loads(json.dumps(single.as_dict()))
    assert (result["step"], result["stopped_by"]) == (12, "last step")  # what training wrote stays
    again = json.loads(json.dumps(found.as_dict()))
    losses = [each["metrics"].pop("loss")["mean"] for each in (during, again)]  # summed in another order
    assert during | {"seconds": 0} == again | {"seconds": 0} and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_evaluations_are_drawn_at_the_steps_of_their_checkpoints_and_other_ways_to_evaluate_apart(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("eval-*"))
    earlier = [6, 12, *(point.step for point in jobs.events(run / "eval").Scalars("precision @ 1")[2:])]
    for more, folder in (({}, "eval"), (dict(raw=True), "eval-raw"), (dict(raw=True, dataset="auto"), "eval-raw-auto")):
        found = evaluate(tmp_path / "run", **more)
        points = jobs.events(tmp_path / "run" / folder).Scalars("precision @ 1")
        assert [point.step for point in points] == ([*earlier, 12] if folder == "eval" else [12])
        assert points[-1].value == pytest.approx(found.metrics["precision @ 1"].mean)


def test_the_wilson_interval_bounds_the_proportions_that_a_two_sided_test_accepts():
    # They satisfy (p - share)^2 <= z^2 p (1 - p) / n: the bounds are the roots of a quadratic.
    for successes, trials in ((8, 10), (0, 10), (10, 10), (7733, 10000), (1, 1)):
        z, share = 1.959964, successes / trials
        roots = sorted(np.roots([1 + z * z / trials, -2 * share - z * z / trials, share**2]).real)
        assert evaluator.wilson_interval(successes, trials) == pytest.approx(roots, abs=1e-6)


def test_metrics_are_summed_in_float64_and_only_a_proportion_has_an_interval(run):
    classes = element_workloads.arrays("test")[1]
    [missing, *_] = set(range(3)) - set(classes[48:])  # in the last batch

    def metrics(outputs, labels):
        hits = tf.cast(tf.equal(tf.argmax(outputs, axis=-1), labels), tf.float32)
        ones, is_first = tf.ones_like(hits), tf.equal(labels, 0)
        large = tf.where(is_first, 2.0**24, ones)  # 2^24 + 1 is no float32
        late = tf.where(tf.equal(labels, missing), ones / 2, ones)
        return {"hit": hits, "half": hits / 2, "large": large, "late": late}

    workload = dataclasses.replace(toy_workload.WORKLOAD, metrics=metrics)
    hit, half, large, late, _ = evaluate(run, workload, batch_size=8).metrics.values()
    assert (hit.low, hit.high) == evaluator.wilson_interval(hit.mean * 50, 50)
    assert (half.mean, half.low, half.high) == (pytest.approx(hit.mean / 2), None, None)
    assert large.mean == sum(2**24 if label == 0 else 1 for label in classes.tolist()) / 50
    assert (late.low, late.high) == (None, None)


def test_a_run_from_python_is_evaluated_with_its_workload_named_and_on_other_data_where_asked_for(tmp_path):
    def renamed(request):
        return dataclasses.replace(toy_workload.load(request), name=f"{request.split} of {request.data_dir}")

    workload = dataclasses.replace(toy_workload.WORKLOAD, examples=renamed)
    jobs.train_toy(tmp_path, workload=workload, num_gpus=1, max_steps=1, data_dir="/here")
    with pytest.raises(errors.RunError, match="trained from Python.*--workload=MODULE"):
        evaluate(tmp_path)
    assert evaluate(tmp_path, workload).data == "test of /here"
    assert evaluate(tmp_path, workload, data_dir="/elsewhere").data == "test of /elsewhere"
    [found] = evaluate_run(EvaluateOptions(train_dir=str(tmp_path), workload="toy_workload"))
    assert found.data == "toy test"


def test_many_classes_have_no_confusion_matrix(run, monkeypatch):
    monkeypatch.setattr(evaluator, "_MOST_CLASSES", 2)
    found = evaluate(run)
    assert (found.confusion, found.class_names, found.num_examples) == (None, (), 50)


def test_watching_sees_each_checkpoint_and_the_last_one_and_ends_with_the_run(tmp_path, monkeypatch, capfd):
    """The trainer is killed at step 15, another's at 25; a third saves and ends after a look at what is there."""
    options, watched = dict(num_gpus=1, save_every_steps=10), tmp_path / "watched"
    killed = [tmp_path / str(i) for i in range(2)]
    first, second = (jobs.copy_after(after, tmp_path / "whole", killed[i]) for i, after in enumerate((15, 25)))
    jobs.train_toy(tmp_path / "whole", first | second, max_steps=30, **options)
    latest, looks, steps, waited, trainer = checkpoint.latest, [], [], [], contextlib.ExitStack()

    def look(folder):
        found = latest(folder)
        looks.append(folder)
        if len(looks) == 5:
            jobs.train_toy(watched, max_steps=30, **options)
        return found

    def sleep(seconds):
        waited.append(capfd.readouterr().err)
        trainer.close()
        if len(waited) == 2:
            shutil.copytree(killed[1], watched, dirs_exist_ok=True)

    shutil.copytree(killed[0], watched)
    monkeypatch.setattr(saved_run, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(saved_run.checkpoint, "latest", look)
    for found in evaluate_run(EvaluateOptions(train_dir=str(watched), watch=True)):
        if not steps:
            trainer.enter_context(directory.RunDirectory(str(watched)).locked())
        steps.append(found.step)
    assert steps == [10, 20, 30] == [point.step for point in jobs.events(watched / "eval").Scalars("precision @ 1")]
    line = "the run has not ended, and no trainer is at work: waiting for one."
    assert [line in said for said in waited] == [False, True, False], waited
    assert jobs.read_json(watched, "result.json")["evaluation"]["step"] == 30


@pytest.mark.parametrize(("suffix", "watch"), [("data-00000-of-00001", False), ("index", True)])
def test_a_damaged_checkpoint_is_an_error(suffix, watch, run, tmp_path):
    """An empty file, or a link to itself, which is listed and does not exist."""
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / f"model.ckpt-12.{suffix}"
    file.unlink()
    file.symlink_to(file) if suffix == "index" else file.touch()
    says = "is a symbolic link" if suffix == "index" else "model.ckpt-12 cannot be restored"
    with pytest.raises(errors.RunError, match=says):
        evaluate(tmp_path / "run", watch=watch)


def test_a_checkpoint_of_another_network_is_an_error(run):
    def another(features, training):
        return features @ tf.compat.v1.get_variable("another", [4, 3], features.dtype)

    with pytest.raises(errors.RunError, match="Key another.* not found in checkpoint. It is of another network: use"):
        evaluate(run, workload=dataclasses.replace(toy_workload.WORKLOAD, inference=another))


def test_a_mistake_is_one_line_that_names_it_and_changes_nothing(refusal, run, tmp_path):
    none, before = tmp_path / "none", jobs.contents(run)
    shutil.copy(run / "run.json", tmp_path)
    for words, part in (
        ([], "--train_dir is missing"),
        ([f"--train_dir={none}"], f"--train_dir={none} holds no run: run.json is missing"),
        ([f"--train_dir={tmp_path}"], f"--train_dir={tmp_path} holds no checkpoint yet"),
        ([f"--train_dir={run}", "--workload=cifar10"], f"{run} is a run of workload toy, not of cifar10"),
        ([f"--train_dir={run}", "--split=validation"], "no validation examples to evaluate. Add some to the data, or"),
        ([f"--train_dir={run}", "--dataset=mnist"], "--dataset=mnist: workload toy knows auto only"),
    ):
        assert part in refusal(evaluate_command, *words)
    assert jobs.contents(run) == before and not none.exists()


@pytest.fixture
def read_only_run(run, tmp_path):
    """A copy of a run in which nothing can be written."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("result.json", "eval*"))
    is_root = small_disk.can_mount(tmp_path / "disk")
    small_disk.make_read_only(copy) if is_root else copy.chmod(0o500)
    yield copy
    small_disk.unmount(copy) if is_root else copy.chmod(0o700)


def test_it_prints_the_metrics_and_a_confusion_matrix(command, run, read_only_run):
    """Also of a run that may only be read: the result is shown and said not to be kept."""
    words = ["--workload=toy_workload", "--raw"]
    status, stdout, stderr = command(evaluate_command, f"--train_dir={run}", *words)
    assert (status, stderr) == (0, "")
    found = jobs.read_json(run, "result.json")["evaluation"]
    metric = found["metrics"]["precision @ 1"]
    lines = stdout.splitlines()
    assert lines[:2] == [
        "step 12: 50 examples of toy test, raw weights",
        f"precision @ 1 = {metric['mean']:.3f} (95 % interval {metric['low']:.3f} to {metric['high']:.3f})",
    ]
    assert lines[-5] == "confusion matrix (row: true class, column: predicted class)"
    table, names = found["confusion"], toy_workload.CLASSES
    rows = [[name, *map(str, row)] for name, row in zip(names, table, strict=True)]
    assert [line.split() for line in lines[-4:]] == [[*names], *rows]
    assert sum(map(sum, table)) == 50
    assert metric["mean"] == pytest.approx(sum(table[i][i] for i in range(3)) / 50)
    *shown, stderr = command(evaluate_command, f"--train_dir={read_only_run}", *words)
    assert shown == [0, stdout] and stderr.count("\n") == 1
    begins = f"tower_train: the evaluation of step 12 is shown, not kept: {read_only_run}/result.json cannot be written"
    assert stderr.startswith(begins) and not [*read_only_run.glob("result.json"), *read_only_run.glob("eval*")]
