"""Ordinary mistakes in a user's program: each is one line that says what a function returned and what is allowed."""

import dataclasses
import sys

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Examples, Workload, errors

TOY = toy_workload.WORKLOAD
LATE = np.where(np.arange(2000) == 1500, 7, np.arange(2000) % 3)  # a label beyond the examples that are looked at first


def late(request):
    """As a user's own reader gives them: the labels are not at hand."""
    features = np.ones([len(LATE), 4], np.float32)
    return Examples("late", len(LATE), lambda: lambda rows: (tf.gather(features, rows), tf.gather(LATE, rows)))


CASES = {  # {what: (fields of the workload, the line)}
    "examples: None": (dict(examples=lambda r: None), "examples returned None. Let it return a tower_train.Examples"),
    "examples: a tuple": (dict(examples=lambda r: (np.ones([9, 4]), np.ones(9))), "returned a tuple of numpy array "),
    "examples: sys.exit": (dict(examples=lambda r: sys.exit(0)), r"examples left the program by sys.exit\(0\)"),
    "examples: no function": (dict(examples=5), r"examples is 5 \(int\). Let it be a function of \(request\)"),
    "open: None": (dict(examples=lambda r: Examples("mine", 9, lambda: None)), "mine: open returned None. Let it"),
    "elements: None": (
        dict(examples=lambda r: Examples("mine", 9, None, elements=lambda: None)),
        "mine: elements returned None.",
    ),
    "inference: numpy": (dict(inference=lambda x, t: np.ones([8, 3])), r"returned numpy array float64 \(8, 3\)"),
    "inference: of features only": (dict(inference=lambda x: x), r"inference is a function of \(x\) \(too many "),
    "inference: no variables": (dict(inference=lambda x, t: x[:, :3]), "trains nothing: its loss depends on no var"),
    "inference_for: None": (dict(inference=None, inference_for=lambda e: None), "inference is None. Let it be a func"),
    "loss: a float": (dict(loss=lambda o, y: 0.5), r"loss returned 0.5 \(float\). Let it return a floating-point s"),
    "augment: a mean": (dict(augment=lambda x, d: tf.reduce_mean(x)), r"augment returned tensor float32 \(\)"),
    "prepare: None": (dict(prepare=lambda x: None, augment=None), "prepare returned None"),
    "views: None": (dict(test_time_augmentation=lambda x: None), "test_time_augmentation returned None. Let it ret"),
    "metrics: a name that is no text": (
        dict(metrics=lambda o, y: {1: tf.ones([8])}),
        r"metrics returned a dict of 1: tensor float32 \(8,\). Let it r",
    ),
    "a label that no sample shows": (
        dict(examples=late),
        r"fails on examples of late \(step \d+, positions \d+ to \d+ of the stream of examples\): Received a label va",
    ),
}


@pytest.mark.parametrize(("fields", "line"), CASES.values(), ids=CASES)
def test_a_mistake_is_one_line_before_the_first_save(fields, line, tmp_path):
    workload = dataclasses.replace(TOY, **fields)
    with pytest.raises(errors.UserError, match=line) as raised:
        jobs.train_toy(tmp_path, workload=workload, max_steps=200, save_every_steps=500, eval_at_end=True)
    assert "\n" not in str(raised.value) and raised.value.exit_status == 2
    assert not jobs.saved_steps(tmp_path)


def test_xlas_flag_that_changes_random_numbers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    with pytest.raises(
        errors.ConfigError, match="TF_XLA_FLAGS='--tf_xla_auto_jit=2': tf_xla_auto_jit changes random numbers"
    ):
        jobs.train_toy(tmp_path, max_steps=1)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(recipe={"learning_rat": 0.1}), "its recipe names 'learning_rat'.*Did you mean 'learning_rate'"),
        (dict(recipe={1: 0.1}), "its recipe names 1, which is no option"),
        (dict(name=None), r"Workload\(name=None\): it must be a text"),
        (dict(metrics=["accuracy"]), "metrics has 'accuracy'. Give keras.metrics objects"),
    ],
)
def test_a_record_of_wrong_fields_is_refused_when_it_is_made(fields, line):
    with pytest.raises(errors.ConfigError, match=line):
        Workload(**(dict(name="mine", examples=None, inference=None) | fields))
