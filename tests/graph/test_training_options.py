"""Clipping, smoothing and accumulation, against numpy or against what they must equal."""

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import errors
from tower_train.graph import gradients
from tower_train.workload import DataRequest, Examples, Workload, softmax_cross_entropy

v1 = tf.compat.v1


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_limits_the_norm_of_all_gradients_together(limit):
    values = [np.array([3.0, 4.0]), np.array([[12.0]])]  # of norm 13
    with tf.Graph().as_default(), v1.Session() as session:
        pairs = [(tf.constant(value), object()) for value in values]
        found = session.run([gradient for gradient, _ in gradients.clip(pairs, limit)])
    for clipped, value in zip(found, values, strict=True):
        np.testing.assert_allclose(clipped, value * min(1, limit / 13), rtol=1e-12)


ROWS, WIDTH, PER_EXAMPLE = 7, 3, 4


def by_gather(table, ids):
    return tf.reduce_mean(tf.gather(table, ids), axis=1)


def by_sparse_lookup(table, ids):
    """Of a ragged number of ids, since those of row 0 are left out."""
    return tf.nn.embedding_lookup_sparse(table, tf.sparse.from_dense(ids), None, combiner="sum")


@pytest.mark.parametrize("lookup", [by_gather, by_sparse_lookup])
@pytest.mark.parametrize("towers", [1, 2, 4, dict(num_gpus=2, variable_update="mirrored")], ids=str)
def test_clipping_takes_the_norm_of_the_sums_of_repeated_rows(lookup, towers):
    """With plain SGD at rate 1 the step is numpy's mean gradient, scaled to the norm of the limit."""
    rng, limit = np.random.default_rng(0), 0.1
    ids, targets = rng.integers(0, ROWS, [16, PER_EXAMPLE]), rng.normal(size=[16, WIDTH])
    ids[:, 0] = 3  # so that no example is empty
    shares = np.full(ids.shape, 1 / PER_EXAMPLE) if lookup is by_gather else np.float64(ids > 0)
    options = dict(num_gpus=towers) if isinstance(towers, int) else towers

    def network(ids, training):
        return lookup(v1.get_variable("table", [ROWS, WIDTH], tf.float64), ids)

    workload = Workload("table", None, network, lambda outputs, labels: tf.reduce_mean((outputs - labels) ** 2))
    options |= dict(dtype="float64", batch_size=16 // options["num_gpus"], learning_rate=1.0, clip_gradients=limit)
    with trainings.opened(workload, Examples.from_arrays("ids", ids, targets), **options) as (built, session):
        table = next(variable for variable in built.saved.variables if variable.op.name == "table")
        start, _, ended = (session.run(fetch) for fetch in (table, built.report, table))
    outputs = np.einsum("bi,biw->bw", shares, start[ids])
    gradient = np.zeros([ROWS, WIDTH])
    np.add.at(gradient, ids, shares[..., np.newaxis] * 2 * (outputs - targets)[:, np.newaxis] / targets.size)
    norm = np.linalg.norm(gradient)
    assert norm > limit
    np.testing.assert_allclose(ended - start, -gradient * limit / norm, rtol=0, atol=1e-12)


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
