"""The trainer without its check that a step is finite, whose cost is measured."""

import dataclasses
import math

import jobs
import pytest
import tensorflow as tf
import toy_workload

from tower_train import errors
from tower_train.bench import sides


def test_an_unguarded_run_is_the_same_as_long_as_all_is_finite(tmp_path):
    with sides.unguarded():
        jobs.train_toy(tmp_path / "unguarded", max_steps=3)
    jobs.train_toy(tmp_path / "guarded", max_steps=3)
    jobs.assert_identical(jobs.variables(tmp_path / "unguarded"), jobs.variables(tmp_path / "guarded"))


def test_an_unguarded_run_takes_what_is_not_finite(tmp_path):
    workload = dataclasses.replace(
        toy_workload.WORKLOAD, distort=lambda features, draws: tf.fill(features.shape, math.nan)
    )
    with sides.unguarded(), pytest.raises(errors.NonFiniteError, match="not finite after step 1: .* in hidden/weights"):
        jobs.train_toy(tmp_path, workload=workload, max_steps=1, summary_every_steps=0)
