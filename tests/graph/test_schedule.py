"""The learning rate is a function of examples seen."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tower_train.config import Config
from tower_train.graph import schedule

v1 = tf.compat.v1
NUM_EXAMPLES = 100
COUNTS = np.append(np.arange(0, 2000, 7), [399, 400, 1099, 1100])


def rates(counts, num_examples=NUM_EXAMPLES, **options):
    with tf.Graph().as_default(), v1.Session() as session:
        seen = v1.placeholder(tf.int64, [])
        rate = schedule.learning_rate(Config(**options), num_examples, seen)
        assert rate.dtype == tf.float64
        return np.array([session.run(rate, {seen: count}) for count in counts])


@pytest.mark.parametrize(("epochs", "stair"), [(2.5, 250), (0.001, 1), (1e308, 2**62)])
def test_the_rate_is_multiplied_by_the_factor_every_so_many_epochs(epochs, stair):
    """A whole number of examples, rounded down, at least one, and in 64 bits."""
    options, counts = dict(learning_rate=0.3, learning_rate_decay_factor=0.7), np.append(COUNTS, 10**15)
    found = rates(counts, num_epochs_per_decay=epochs, **options)
    np.testing.assert_allclose(found, 0.3 * 0.7 ** (counts // stair), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("ends", [(4, 11), (2**62,)])
def test_piecewise_decays_at_its_boundaries(ends):
    found = rates(COUNTS, lr_schedule="piecewise", lr_boundaries=ends, learning_rate_decay_factor=0.1)
    passed = np.sum([COUNTS >= end * NUM_EXAMPLES for end in ends], axis=0)
    np.testing.assert_allclose(found, 0.1 * 0.1**passed, rtol=1e-14)


@pytest.mark.parametrize(
    ("kind", "expected", "stop"),
    [
        ("linear", lambda t: 1 - t, dict(epochs=10.0)),
        ("cosine", lambda t: (1 + np.cos(np.pi * t)) / 2, dict(max_steps=50)),
    ],
)
def test_annealing_ends_at_zero_with_the_last_step(kind, expected, stop):
    """Both stop after 1,000 examples, at 20 examples a step."""
    found = rates(COUNTS, lr_schedule=kind, learning_rate=0.2, num_gpus=2, batch_size=10, **stop)
    np.testing.assert_allclose(found, 0.2 * expected(np.minimum(COUNTS / 1000, 1)), atol=1e-15)


@pytest.mark.parametrize("course", ["0:0.2,0.23:1,1:0.07", "0.1:3,0.5:0,0.75:2", "0.5:2"])
def test_points_are_joined_by_lines(course):
    shares, factors = np.array([point.split(":") for point in course.split(",")], np.float64).T
    options = dict(lr_schedule="points", lr_points=course, learning_rate=11.5, num_gpus=2, batch_size=10, max_steps=50)
    found = rates(COUNTS, **options)
    np.testing.assert_allclose(found, 11.5 * np.interp(COUNTS / 1000, shares, factors), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(rates(shares * 1000, **options), 11.5 * factors, rtol=1e-12, atol=1e-14)
    assert schedule.largest_factor(Config(**options, lr_scaling="linear", lr_base_batch=5)) == 4 * max(factors)


@pytest.mark.parametrize(("kind", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_rate_follows_the_global_batch(kind, factor):
    base = {} if kind == "none" else {"lr_base_batch": 16}
    options = dict(lr_scaling=kind, batch_size=8, num_gpus=4, accumulate_steps=2, **base)
    np.testing.assert_allclose(rates([0, 500], **options), 0.1 * factor, rtol=1e-14)
    assert rates([0], lr_scaling=kind) == pytest.approx(0.1), "a batch of 128 is what the default rate is meant for"


def test_warm_up_rises_from_the_base_batchs_rate_to_the_scaled_one():
    found = rates(COUNTS, warmup_epochs=5.0, lr_scaling="linear", lr_base_batch=32)
    np.testing.assert_allclose(found, 0.1 * (1 + 3 * np.minimum(COUNTS / 500, 1)), rtol=1e-14)
    found = rates(COUNTS, warmup_epochs=5.0, lr_schedule="cosine", epochs=15)
    steps = math.ceil(15 * NUM_EXAMPLES / 128)
    expected = 0.1 * (1 + np.cos(np.pi * np.minimum(COUNTS / (steps * 128), 1))) / 2
    np.testing.assert_allclose(found, expected * (0.1 + 0.9 * np.minimum(COUNTS / 500, 1)), atol=1e-15)
