"""The learning rate is a staircase in examples seen."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train.graph import schedule


def rates(examples_seen, kind="exponential", epochs_per_decay=None, boundaries=None, **options):
    of_run = dict(points=None, scale=1.0, warmup_epochs=0.0, total_examples=10**16)
    rates = schedule.Schedule(kind, epochs_per_decay=epochs_per_decay, boundaries=boundaries, **options, **of_run)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        seen = tf.compat.v1.placeholder(tf.int64, [])
        rate = rates.rate(seen)
        assert rate.dtype == tf.float64
        return [session.run(rate, {seen: count}) for count in examples_seen]


def test_the_rate_is_multiplied_by_the_factor_every_so_many_epochs():
    counts = np.arange(0, 2000, 7)
    found = rates(counts, initial=0.3, factor=0.7, epochs_per_decay=2.5, num_examples=100)
    np.testing.assert_allclose(found, [0.3 * 0.7 ** (count // 250) for count in counts], rtol=1e-14)


def test_the_rate_drops_at_the_first_example_of_the_next_stair():
    """The original's numbers: 50,000 examples, a decay by 0.1 every 350 epochs."""
    boundary = 350 * 50_000
    counts = [0, boundary - 1, boundary, 2 * boundary - 1, 2 * boundary]
    found = rates(counts, initial=0.1, factor=0.1, epochs_per_decay=350.0, num_examples=50_000)
    np.testing.assert_allclose(found, [0.1, 0.1, 0.01, 0.01, 0.001], rtol=1e-14)


def test_a_stair_is_a_whole_number_of_examples_rounded_down():
    found = rates([10, 11, 21, 22], initial=1.0, factor=0.5, epochs_per_decay=1.7, num_examples=7)  # floor(11.9) = 11
    assert found == [1.0, 0.5, 0.5, 0.25]


def test_a_stair_is_at_least_one_example():
    assert rates([0, 1, 2], initial=1.0, factor=0.5, epochs_per_decay=0.01, num_examples=7) == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("count", [0, 10**6, 10**15])
def test_factor_one_never_decays(count):
    assert rates([count], initial=0.1, factor=1.0, epochs_per_decay=1.0, num_examples=10) == [0.1]


@pytest.mark.parametrize("epochs", [1e38, 1e308])
def test_a_stair_that_no_training_comes_to_never_ends(epochs):
    assert rates([0, 10**15], initial=0.1, factor=0.5, epochs_per_decay=epochs, num_examples=50_000) == [0.1, 0.1]
    boundaries = [int(min(epochs, 2**62))]
    assert rates([10**15], "piecewise", boundaries=boundaries, initial=0.1, factor=0.5, num_examples=50_000) == [0.1]


def test_it_is_tensorflows_staircase():
    """tf.compat.v1.train.exponential_decay, with the examples seen for the step."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        counts = [0, 299, 300, 899, 900]
        theirs = [
            session.run(tf.compat.v1.train.exponential_decay(0.1, tf.constant(c, tf.int64), 300, 0.9, staircase=True))
            for c in counts
        ]
    ours = rates(counts, initial=0.1, factor=0.9, epochs_per_decay=3.0, num_examples=100)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # theirs is float32
