"""Faults of an evaluation and ordinary mistakes in a user's program are one line before the first step or save, and a
start that fails leaves nothing behind."""

import dataclasses
import os

import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Examples, Workload, errors
from tower_train.data import tf_data
from tower_train.inference import curves, evaluator
from tower_train.run_dir import directory

TOY = toy_workload.WORKLOAD


def of_test_labels(values, **known):
    """The toy workload, whose test examples have other labels, which are known only when they come."""

    def load(request):
        fetch = lambda rows: (tf.ones([tf.size(rows), 4]), tf.gather(values, rows))  # noqa: E731
        test = dict(num_examples=len(values), open=lambda: fetch, labels=None) | known
        return dataclasses.replace(toy_workload.load(request), **test if request.split == "test" else {})

    return dataclasses.replace(TOY, examples=load)


def measured(metrics):
    return dataclasses.replace(TOY, metrics=metrics)


def network(units):
    return dataclasses.replace(TOY, inference=lambda features, training: toy_workload.layer("x", features, units))


def unnamed(workload):
    """Of labels that are known only when they come, and of no names."""
    load = lambda request: dataclasses.replace(toy_workload.load(request), class_names=(), labels=None)  # noqa: E731
    return dataclasses.replace(workload, examples=load)


def no_test(request):
    if request.split == "test":
        raise errors.DataError("/data/test holds no images")
    return toy_workload.load(request)


def empty_test(request):
    """TensorFlow cannot know how many examples pass the filter."""
    make = element_workloads.ending if request.split == "test" else element_workloads.in_order
    return tf_data.examples("rows", lambda: make(request).filter(lambda *_: request.split == "train"), 96)


CASES = {
    "a scalar metric": (
        measured(lambda outputs, labels: {"off": tf.reduce_mean(outputs)}),
        r"^workload toy: the metric 'off' is float32 \[\] for a batch of 16 examples. Let metrics return one number",
    ),
    "a broadcast metric": (
        measured(lambda outputs, labels: {"off": outputs[:, :1] - tf.cast(labels, tf.float32)}),
        r"^workload toy: the metric 'off' is float32 \[16, 16\] for a batch of 16 examples. Let metrics return one",
    ),
    "a metric whose shape shows in a step": (
        measured(lambda outputs, labels: {"off": tf.numpy_function(lambda o: o[:, 0][:3], [outputs], tf.float32)}),
        r"^workload toy: tower_\d/metrics/.* fails on examples of toy test: .*\[3\].*\[16\]",
    ),
    "too few outputs for the loss": (network(2), "^toy train has 3 classes.*, but the network of workload toy gives 2"),
    "a test label too many": (
        of_test_labels(np.arange(4)),
        r"^workload toy: tower_\d/metrics/.* fails on examples of toy test: .*(= 3 is not in|value of 3 ).*Has a lab",
    ),
    "a known one": (of_test_labels(np.arange(30), labels=np.arange(30)), "^toy test: there is a label 3; "),
    "an empty test set": (dataclasses.replace(TOY, examples=empty_test), "^rows: its dataset gives no examples"),
    "other variables": (
        dataclasses.replace(TOY, inference=lambda x, training: toy_workload.layer(f"of_{training}", x, 3)),
        "^workload toy: its network has the variable of_False/.* for toy test, and none of that name in training",
    ),
}


@pytest.mark.parametrize(("workload", "message"), CASES.values(), ids=CASES)
def test_a_fault_of_the_evaluation_is_one_line_at_the_start(workload, message, tmp_path, capsys):
    with pytest.raises(errors.UserError, match=message) as raised:
        jobs.train_small(tmp_path / "runs" / "first", workload=workload, max_steps=40, eval_at_end=True)
    assert "\n" not in str(raised.value)
    assert "step 5" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "not even the folder above"


def test_evaluations_and_their_look_ahead_change_no_bit(toy_run, tmp_path, monkeypatch, capsys):
    tried = []
    try_out = evaluator.Evaluator.try_out
    monkeypatch.setattr(evaluator.Evaluator, "try_out", lambda *a: (tried.append(a), try_out(*a)))
    jobs.train_toy(tmp_path / "run", max_steps=40, eval_every_steps=15, eval_at_end=True)
    assert tried
    tried.clear()
    jobs.train_toy(tmp_path / "run", max_steps=40, eval_every_steps=15)  # nothing is due any more
    assert not tried
    jobs.assert_identical(jobs.variables(tmp_path / "run"), jobs.variables(toy_run, 40))
    jobs.train_small(tmp_path / "wide", workload=network(9), max_steps=2, eval_at_end=True)
    found = jobs.read_json(tmp_path / "wide", "result.json")["evaluation"]
    assert found["confusion"] is None and found["num_examples"] == 50


def test_an_evaluation_that_fails_costs_no_step_and_what_was_saved_is_told_first(tmp_path, monkeypatch, capsys):
    failures = [errors.DataError("test/3.png is gone."), error := IndexError("out of bounds")]

    def fail(*_):
        raise failures.pop(0)

    why = "ended at step 6 and is saved, but .*out of bou"
    with monkeypatch.context() as patch, pytest.raises(errors.EvaluationError, match=why) as raised:
        patch.setattr(evaluator.Evaluator, "evaluate", fail)
        jobs.train_small(tmp_path, max_steps=6, eval_every_steps=3)
    assert raised.value.exit_status == 4 and raised.value.__cause__ is error
    out = capsys.readouterr().out
    for step, reason in ((3, "test/3.png is gone."), (6, "out of bounds")):
        assert f"*** The evaluation of {tmp_path}/model.ckpt-{step} failed: {reason}" in out
    assert "the run goes on." in out
    assert f"\nSaved:    {tmp_path}/model.ckpt-6\n" in out and "Evaluate: " in out
    assert jobs.read_json(tmp_path, "result.json")["step"] == jobs.saved_step(tmp_path) == 6
    (tmp_path / "result.json").unlink()  # as if killed after the last save
    loss = jobs.metrics(tmp_path)[-1]["loss"]
    for _ in range(2):
        assert jobs.train_small(tmp_path, max_steps=6, eval_every_steps=3, eval_at_end=True).step == 6
        result = jobs.read_json(tmp_path, "result.json")
        assert (result["evaluation"]["step"], result["loss"]) == (6, loss)
        assert curves.history(tmp_path)["val_step"] == [6], "that of the newest checkpoint, once"


def test_a_start_that_fails_leaves_folders_of_the_users_and_older_runs_as_they_were(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    why = r"^workload toy: tower_\d/.* fails on examples of toy train .* 2 .*range of \[0, 2\). Has a label"
    for name in ("empty", "notes"):
        with pytest.raises(errors.GraphError, match=why):
            jobs.train_small(tmp_path / name, workload=unnamed(network(2)), max_steps=5)
    assert jobs.contents(tmp_path) == {tmp_path / "notes" / "mine.txt": b"mine"}
    assert sorted(os.listdir(tmp_path)) == ["empty", "notes"] and not os.listdir(tmp_path / "empty")
    jobs.train_small(tmp_path / "run", max_steps=2)
    before = jobs.contents(tmp_path / "run")
    with pytest.raises(errors.DataError, match="^/data/test holds no images"):
        jobs.train_small(
            tmp_path / "run", workload=dataclasses.replace(TOY, examples=no_test), max_steps=4, eval_at_end=True
        )
    assert jobs.contents(tmp_path / "run") == before and (tmp_path / "run" / directory.LOCK).exists()


# Ordinary mistakes in a user's program: each is one line that says what a function returned and what is allowed.

LATE = np.where(np.arange(2000) == 1500, 7, np.arange(2000) % 3)  # a label beyond the examples that are looked at first


def late(request):
    """As a user's own reader gives them: the labels are not at hand."""
    features = np.ones([len(LATE), 4], np.float32)
    return Examples("late", len(LATE), lambda: lambda rows: (tf.gather(features, rows), tf.gather(LATE, rows)))


MISTAKES = {  # {what: (fields of the workload, the line)}
    "examples: None": (dict(examples=lambda r: None), "examples returned None. Let it return a tower_train.Examples"),
    "examples: a tuple": (dict(examples=lambda r: (np.ones([9, 4]), np.ones(9))), "returned a tuple of numpy array "),
    "inference: of features only": (
        dict(inference=lambda x: x),
        r"is a function of \(x\) \(too many .* Let it be inference.features, training.",
    ),
    "examples: no function": (dict(examples=5), r"examples is 5 \(int\). Let it be a function"),
    "open: None": (dict(examples=lambda r: Examples("mine", 9, lambda: None)), "mine: open returned None. Let it"),
    "elements: None": (dict(examples=lambda r: Examples("mine", 9, None, elements=lambda: None)), "elements returned"),
    "inference: numpy": (dict(inference=lambda x, t: np.ones([8, 3])), r"returned numpy array float64 \(8, 3\)"),
    "inference: no variables": (dict(inference=lambda x, t: x[:, :3]), "trains nothing: its loss depends on no var"),
    "inference_for: None": (dict(inference=None, inference_for=lambda e: None), "inference is None. Let it be a func"),
    "loss: a float": (dict(loss=lambda o, y: 0.5), r"loss returned 0.5 \(float\). Let it return a floating-point s"),
    "augment: a mean": (dict(augment=lambda x, d: tf.reduce_mean(x)), r"augment returned tensor float32 \(\)"),
    "prepare: None": (dict(prepare=lambda x: None, augment=None), "prepare returned None"),
    "metrics: a name that is no text": (
        dict(metrics=lambda o, y: {1: tf.ones([8])}),
        r"metrics returned a dict of 1: tensor float32 \(8,\). Let it r",
    ),
    "a label that no sample shows": (
        dict(examples=late),
        r"fails on examples of late \(step \d+, positions \d+ to \d+ of the stream of examples\): Received a label va",
    ),
}


@pytest.mark.parametrize(("fields", "line"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_before_the_first_save(fields, line, tmp_path):
    workload = dataclasses.replace(TOY, **fields)
    with pytest.raises(errors.UserError, match=line) as raised:
        jobs.train_small(tmp_path, workload=workload, max_steps=200, save_every_steps=500, eval_at_end=True)
    assert "\n" not in str(raised.value) and raised.value.exit_status == 2
    assert not jobs.saved_steps(tmp_path)


def test_xlas_flag_that_changes_random_numbers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    with pytest.raises(
        errors.ConfigError, match="TF_XLA_FLAGS='--tf_xla_auto_jit=2': tf_xla_auto_jit changes random numbers"
    ):
        jobs.train_small(tmp_path, max_steps=1)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(recipe={"learning_rat": 0.1}), "its recipe names 'learning_rat', which is no option"),
        (dict(metrics=["accuracy"]), "metrics has 'accuracy'. Give keras.metrics objects"),
    ],
)
def test_a_record_of_wrong_fields_is_refused_when_it_is_made(fields, line):
    with pytest.raises(errors.ConfigError, match=line):
        Workload(**(dict(name="mine", examples=None, inference=None) | fields))
