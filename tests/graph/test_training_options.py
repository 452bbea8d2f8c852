"""Schedules, optimizers, clipping, smoothing and accumulation, against numpy or against what they must equal."""

import math

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import errors, layers
from tower_train.config import Config
from tower_train.graph import training, update
from tower_train.workload import DataRequest, Examples, Workload, softmax_cross_entropy

v1 = tf.compat.v1
NUM_EXAMPLES = 100


def rates(counts, **options):
    """The learning rate after each number of examples."""
    with tf.Graph().as_default(), v1.Session() as session:
        seen = v1.placeholder(tf.int64, [])
        rate = training.learning_schedule(Config(**options), NUM_EXAMPLES).rate(seen)
        assert rate.dtype == tf.float64
        return np.array([session.run(rate, {seen: count}) for count in counts])


COUNTS = np.arange(0, 2000, 7)


def test_without_options_the_rate_is_the_staircase():
    found = rates(COUNTS, learning_rate=0.3, learning_rate_decay_factor=0.5, num_epochs_per_decay=3)
    np.testing.assert_allclose(found, 0.3 * 0.5 ** (COUNTS // 300), rtol=1e-14)


def test_piecewise_decays_at_its_boundaries():
    found = rates(COUNTS, lr_schedule="piecewise", lr_boundaries=(4, 11), learning_rate_decay_factor=0.1)
    np.testing.assert_allclose(found, np.select([COUNTS < 400, COUNTS < 1100], [0.1, 0.01], 0.001), rtol=1e-14)
    assert rates([399, 400], lr_schedule="piecewise", lr_boundaries=(4,)).tolist() == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize(
    ("kind", "expected"), [("linear", lambda t: 1 - t), ("cosine", lambda t: (1 + np.cos(np.pi * t)) / 2)]
)
@pytest.mark.parametrize("stop", [dict(epochs=10.0), dict(max_steps=50)])
def test_annealing_ends_at_zero_with_the_last_step(kind, expected, stop):
    """Both stop after 1,000 examples, at 20 examples a step."""
    found = rates(COUNTS, lr_schedule=kind, learning_rate=0.2, num_gpus=2, batch_size=10, **stop)
    np.testing.assert_allclose(found, 0.2 * expected(np.minimum(COUNTS / 1000, 1)), atol=1e-15)


@pytest.mark.parametrize("stop", [dict(epochs=10.0), dict(max_steps=50)])
@pytest.mark.parametrize("course", ["0:0.2,0.23:1,1:0.07", "0.1:3,0.5:0,0.75:2", "0.5:2"])
def test_points_are_joined_by_lines(course, stop):
    """Over 1,000 examples; constant before the first and after the last."""
    shares, factors = np.array([point.split(":") for point in course.split(",")], np.float64).T
    options = dict(lr_schedule="points", lr_points=course, learning_rate=11.5, num_gpus=2, batch_size=10, **stop)
    found = rates(COUNTS, **options)
    np.testing.assert_allclose(found, 11.5 * np.interp(COUNTS / 1000, shares, factors), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(rates(shares * 1000, **options), 11.5 * factors, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize(("start", "gradient"), [(np.zeros([2, 2]), np.ones([2, 2])), (np.ones(3), np.ones(3) * 2)])
def test_lars_leaves_zero_weights_and_biases_the_plain_rate(start, gradient):
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("w", initializer=tf.constant(start))
        [(found, _)] = update.lars_gradients([(tf.constant(gradient), variable)])
        session.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(found), gradient)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_limits_the_norm_of_all_gradients_together(limit):
    values = [np.array([3.0, 4.0]), np.array([[12.0]])]  # of norm 13
    with tf.Graph().as_default(), v1.Session() as session:
        pairs = [(tf.constant(value), object()) for value in values]
        found = session.run([gradient for gradient, _ in update.limited(pairs, limit, "momentum")])
    for clipped, value in zip(found, values, strict=True):
        np.testing.assert_allclose(clipped, value * min(1, limit / 13), rtol=1e-12)


def test_clipping_reaches_the_update():
    """With plain SGD at rate 1 the whole step has the norm of the limit."""
    examples = toy_workload.load(DataRequest("train"))
    options = dict(dtype="float64", batch_size=16, learning_rate=1.0)
    limit = 1e-3
    start = trainings.train(toy_workload.WORKLOAD, examples, steps=0, **options)[1]
    ended = trainings.train(toy_workload.WORKLOAD, examples, steps=1, clip_gradients=limit, **options)[1]
    moved = [ended[name] - start[name] for name in start if name.endswith(("weights", "biases"))]
    assert np.sqrt(sum(np.sum(part**2) for part in moved)) == pytest.approx(limit, rel=1e-9)


def test_smooth_labels_are_spread_over_all_classes():
    rng = np.random.default_rng(0)
    logits, labels, smoothing = rng.normal(size=[50, 4]), rng.integers(0, 4, 50), 0.3
    with tf.Graph().as_default(), v1.Session() as session:
        found = session.run(softmax_cross_entropy(tf.constant(logits), tf.constant(labels), smoothing))
    targets = np.full([50, 4], smoothing / 4)
    targets[np.arange(50), labels] += 1 - smoothing
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert found == pytest.approx(-np.mean(np.sum(targets * log_probabilities, axis=1)), rel=1e-12)


def test_smoothing_reaches_the_usual_loss_and_no_other():
    examples = toy_workload.load(DataRequest("train"))
    options = dict(steps=1, batch_size=16, dtype="float64")
    plain = trainings.train(toy_workload.WORKLOAD, examples, **options)[0]
    assert trainings.train(toy_workload.WORKLOAD, examples, label_smoothing=0.5, **options)[0] != plain
    other = Workload("other", toy_workload.load, toy_workload.network, lambda outputs, labels: tf.reduce_mean(outputs))
    with pytest.raises(errors.ConfigError, match="--label_smoothing=0.5: workload other has a loss of its own"):
        trainings.train(other, examples, label_smoothing=0.5, **options)


@pytest.mark.parametrize(("num_gpus", "optimizer"), [(1, "momentum"), (2, "adam"), (2, "muon")])
def test_four_small_batches_are_one_that_is_four_times_as_large(num_gpus, optimizer):
    """Losses, weights, moving averages and counters; batches of 32 and of 128, or of half that on two towers."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=[300, 4]).astype(np.float32), rng.integers(0, 3, 300)
    examples = Examples.from_arrays("many", features, labels, toy_workload.CLASSES)
    options = dict(steps=8, dtype="float64", num_gpus=num_gpus, optimizer=optimizer, learning_rate=0.01)
    one = trainings.train(toy_workload.WORKLOAD, examples, batch_size=128 // num_gpus, **options)
    four = trainings.train(toy_workload.WORKLOAD, examples, batch_size=32 // num_gpus, accumulate_steps=4, **options)
    trainings.assert_same(four, one)
    assert four[1]["global_step"] == 8 and four[1]["examples_seen"] == 8 * 128


def test_a_device_begins_a_batch_only_when_it_has_the_gradients_of_the_one_before():
    """So that it holds one batch's activations at a time: each forward pass, and the end of the one before."""
    built, order = [], []

    def network(features, training):
        batch = len(built)
        built.append(batch)

        @tf.custom_gradient
        def watched(x):
            def note(kind, value):
                def work(value):
                    order.append((batch, kind))
                    return value

                result = tf.numpy_function(work, [value], value.dtype)
                return tf.ensure_shape(result, value.shape)

            return note("forward", x), lambda grad: note("gradient", grad)

        kernel = v1.get_variable("kernel", [4, 3], features.dtype)
        return watched(features @ kernel)

    workload = Workload("watched", toy_workload.load, network)
    examples = toy_workload.load(DataRequest("train"))
    trainings.train(workload, examples, steps=1, batch_size=4, accumulate_steps=3, dtype="float64")
    assert order == [(batch, kind) for batch in range(3) for kind in ("forward", "gradient")]


def test_moving_statistics_follow_the_mean_over_accumulated_batches():
    features = np.random.default_rng(0).normal(3, 2, [64, 4])
    examples = Examples.from_arrays("many", features, np.arange(64) % 3)

    def network(features, training):
        seen.append(features)
        normal = layers.batch_normalization(features, training, momentum=0.0, name="norm")
        return toy_workload.layer("out", normal, 3)

    seen = []
    workload = Workload("norm", lambda request: examples, network)
    ended = trainings.train(workload, examples, steps=1, batch_size=16, accumulate_steps=4, dtype="float64")[1]
    assert len(seen) == 4  # each of 16 examples, together all: the mean of their means is the mean of all
    np.testing.assert_allclose(ended["norm/moving_mean"], features.mean(axis=0), rtol=1e-12)
    assert (ended["norm/moving_variance"] < features.var(axis=0)).all()
