"""Means, sums of sparse rows, clipping and accumulation, against numpy or what they must equal."""

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train.errors import GraphError
from tower_train.graph import gradients
from tower_train.workload import DataRequest, Examples, Workload

v1 = tf.compat.v1


ROWS, WIDTH, PER_EXAMPLE = 7, 3, 4


def by_gather(table, ids):
    return tf.reduce_mean(tf.gather(table, ids), axis=1)


def by_sparse_lookup(table, ids):
    """Of a ragged number of ids, since those of row 0 are left out."""
    return tf.nn.embedding_lookup_sparse(table, tf.sparse.from_dense(ids), None, combiner="sum")


MIRRORED = dict(num_gpus=2, variable_update="mirrored")


@pytest.mark.parametrize(
    ("lookup", "options", "decay"),
    [(by_gather, dict(num_gpus=1), 0), (by_gather, dict(num_gpus=4), 0.3), (by_sparse_lookup, MIRRORED, 0.3)],
)
def test_sparse_gradients_are_decayed_and_clipped_as_the_sums_of_repeated_rows(lookup, options, decay):
    """With plain SGD at rate 1 the step is numpy's mean gradient, scaled to the norm of the limit."""
    rng, limit = np.random.default_rng(0), 0.1
    ids, targets = rng.integers(0, ROWS, [16, PER_EXAMPLE]), rng.normal(size=[16, WIDTH])
    ids[:, 0] = 3  # so that no example is empty
    shares = np.full(ids.shape, 1 / PER_EXAMPLE) if lookup is by_gather else np.float64(ids > 0)

    def network(ids, training):
        regularizer = (lambda table: decay * tf.nn.l2_loss(table)) if decay else None
        return lookup(v1.get_variable("table", [ROWS, WIDTH], tf.float64, regularizer=regularizer), ids)

    workload = Workload("table", None, network, lambda outputs, labels: tf.reduce_mean((outputs - labels) ** 2))
    examples, batch = Examples.from_arrays("ids", ids, targets), 16 // options["num_gpus"]
    options = dict(dtype="float64", batch_size=batch, learning_rate=1.0, clip_gradients=limit) | options
    with trainings.opened(workload, examples, **options) as (built, session):
        table = next(variable for variable in built.saved.variables if variable.op.name == "table")
        start, _, ended = (session.run(fetch) for fetch in (table, built.report, table))
    outputs = np.einsum("bi,biw->bw", shares, start[ids])
    gradient = decay * start
    np.add.at(gradient, ids, shares[..., np.newaxis] * 2 * (outputs - targets)[:, np.newaxis] / targets.size)
    norm = np.linalg.norm(gradient)
    assert norm > limit
    np.testing.assert_allclose(ended - start, -gradient * limit / norm, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize(
    ("towers", "text"),
    [
        (["ab", "a-", "ab", "a-"], "^b has no gradient in tower_1, tower_3 but has one"),
        (["ab", "ab", "ac"], "^tower_2 and tower_0 have gradients for different variables: b, c"),
        (["ab", "ba"], "tower_1 and tower_0 .* another order"),
        (["ab", "aB"], "^b has a sparse gradient in some towers and a dense one"),
    ],
)
def test_towers_that_differ_are_refused_by_variable_and_tower(towers, text):
    """A letter is a variable, of which a capital has a sparse gradient; the hyphen is b without one."""
    with tf.Graph().as_default(), pytest.raises(GraphError, match=text):
        grads = {name: (tf.ones([3, 2]), v1.get_variable(name, [3, 2])) for name in "abcdefg"}
        sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([2]), tf.constant([3, 2]))
        grads |= {"-": (None, grads["b"][1]), "B": (sparse, grads["b"][1])}
        gradients.average_gradients([[grads[letter] for letter in tower] for tower in towers])


def test_copies_of_variables_are_one_by_a_name_that_is_unique():
    def copies(name):
        return [tf.Variable(float(i), name=name) for i in range(2)]

    ones, (one, copied) = tf.constant(1.0), copies("a")
    [(mean, variable)] = gradients.average_gradients([[(ones, one)], [(3 * ones, copied)]])
    assert mean == 2 and variable is one
    one, other = copies("shared")
    with pytest.raises(GraphError, match="the same variables in another order"):
        gradients.average_gradients([[(ones, one), (ones, other)], [(ones, other), (ones, one)]])


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "tf.function"])
def test_plain_variables_of_programs_without_a_graph(wrap, capsys):
    table, bias, unused = (tf.Variable([[1.0], [2.0], [3.0]]), tf.Variable([4.0, 5.0]), tf.Variable(0.0, name="unused"))
    variables = [table, bias, unused]  # the first two are both called "Variable"

    def step(scale):
        towers = []
        for i in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [i, 2])) + scale * (i + 1) * tf.reduce_sum(bias * bias)
            towers.append(list(zip(tape.gradient(loss, variables), variables, strict=True)))
        (of_table, _), (of_bias, found) = gradients.average_gradients(towers)
        assert found is bias and isinstance(of_table, tf.IndexedSlices)
        return tf.convert_to_tensor(of_table), of_bias

    for _ in range(3):
        of_table, of_bias = wrap(step)(tf.constant(3.0))
        np.testing.assert_allclose(of_table, [[0.5], [0.5], [1.0]])
        np.testing.assert_allclose(of_bias, [36.0, 45.0])  # (1 + 2) / 2 * 3 * 2 * bias
    [line] = capsys.readouterr().err.splitlines()
    assert "does not depend on unused" in line


def test_finite_gradients_whose_mean_overflows_change_nothing():
    """The sum of two towers' gradients of 3e38 is no float32."""

    def inference(features, training):
        return features @ v1.get_variable("weights", [1, 2], initializer=v1.zeros_initializer())

    examples = Examples.from_arrays("large", np.full([4, 1], 3e38, np.float32), np.zeros(4, np.int32))
    workload = Workload("linear", None, inference, loss=lambda outputs, labels: tf.reduce_mean(outputs[:, 0]))
    with trainings.opened(workload, examples, num_gpus=2, batch_size=2) as (built, session):
        report = session.run(built.report)
        assert not any(session.run(v1.trainable_variables())[0].ravel())
    assert np.all(report.finite[:-1]) and built.checked[0] == "the loss"
    assert report.finite[-1].tolist() == [True, False]
    assert (report.step, report.examples) == (0, 0)
