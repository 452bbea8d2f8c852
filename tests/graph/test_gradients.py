"""The towers' gradients become one mean, which is applied only where everything is finite."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train.errors import GraphError
from tower_train.graph import gradients
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def variable(name, *shape):
    return v1.get_variable(name, shape, initializer=v1.zeros_initializer())


def slices(values, indices, rows):
    values = tf.constant(values, tf.float32)
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([rows, *values.shape[1:]]))


def dense(grad):
    """The sum that a sparse gradient stands for."""
    return tf.math.unsorted_segment_sum(grad.values, grad.indices, grad.dense_shape[0])


class TestAverageGradients:
    @pytest.mark.parametrize("num_towers", [1, 2, 5])
    def test_each_variable_gets_the_mean_over_towers_in_the_towers_order(self, session, num_towers):
        variables = [variable("c", 3, 2), variable("a"), variable("b", 4)]
        rng = np.random.default_rng(0)
        values = [[rng.normal(size=v.shape).astype(np.float32) for v in variables] for _ in range(num_towers)]
        averaged = gradients.average_gradients(
            [[(tf.constant(value), v) for value, v in zip(tower, variables, strict=True)] for tower in values]
        )
        assert [v for _, v in averaged] == variables
        for found, expected in zip(session.run([grad for grad, _ in averaged]), zip(*values, strict=True), strict=True):
            np.testing.assert_allclose(found, np.mean(expected, axis=0), rtol=1e-6, atol=1e-7)

    def test_a_variable_without_a_gradient_is_left_out_with_one_warning_that_names_it(self, session, capsys):
        used, unused = variable("used"), variable("scope/unused")
        averaged = gradients.average_gradients([[(None, unused), (tf.constant(float(i)), used)] for i in range(3)])
        assert [v for _, v in averaged] == [used]
        assert session.run(averaged[0][0]) == 1.0
        [warning] = capsys.readouterr().err.splitlines()
        assert "The loss does not depend on scope/unused: it has no gradient" in warning

    def test_a_gradient_that_only_some_towers_have_is_an_error_that_names_variable_and_towers(self, session):
        a, b = variable("a"), variable("scope/b")
        present = [(tf.constant(1.0), a), (tf.constant(1.0), b)]
        missing = [(tf.constant(1.0), a), (None, b)]
        with pytest.raises(GraphError, match="^scope/b has no gradient in tower_1, tower_3 but has one"):
            gradients.average_gradients([present, missing, present, missing])

    def test_towers_with_different_variables_are_an_error_that_names_those(self, session):
        a, b, c = variable("a"), variable("b"), variable("c")
        one = tf.constant(1.0)
        with pytest.raises(GraphError, match="^tower_2 and tower_0 have gradients for different variables: b, c"):
            gradients.average_gradients([[(one, a), (one, b)], [(one, a), (one, b)], [(one, a), (one, c)]])
        with pytest.raises(GraphError, match="different variables: b"):
            gradients.average_gradients([[(one, a), (one, b)], [(one, a)]])

    def test_variables_in_another_order_are_an_error(self, session):
        a, b, one = variable("a"), variable("b"), tf.constant(1.0)
        with pytest.raises(GraphError, match="tower_1 and tower_0 .* another order"):
            gradients.average_gradients([[(one, a), (one, b)], [(one, b), (one, a)]])

    @pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "tf.function"])
    def test_plain_variables_of_programs_without_a_graph(self, wrap, capsys):
        table, bias, unused = (
            tf.Variable([[1.0], [2.0], [3.0]]),
            tf.Variable([4.0, 5.0]),
            tf.Variable(0.0, name="unused"),
        )
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

    @pytest.mark.parametrize("num_towers", [1, 3])
    def test_sparse_gradients_stay_sparse_and_average_as_dense_ones_would(self, session, num_towers):
        """Indices repeat within a tower and between towers; absent rows count as 0."""
        embedding, rng = variable("embedding", 6, 2), np.random.default_rng(0)
        expected, tower_grads = np.zeros([6, 2]), []
        for _ in range(num_towers):
            values, indices = rng.normal(size=[4, 2]), np.array([1, 5, 1, rng.integers(6)])
            np.add.at(expected, indices, values / num_towers)
            tower_grads.append([(slices(values, indices, 6), embedding)])
        [(mean, _)] = gradients.average_gradients(tower_grads)
        assert isinstance(mean, tf.IndexedSlices)
        np.testing.assert_allclose(session.run(dense(mean)), expected, rtol=1e-5, atol=1e-6)

    def test_sparse_in_one_tower_and_dense_in_another_is_an_error(self, session):
        embedding = variable("embedding", 6, 2)
        towers = [[(slices([[1.0, 2.0]], [3], 6), embedding)], [(tf.zeros([6, 2]), embedding)]]
        with pytest.raises(GraphError, match="^embedding has a sparse gradient in some towers and a dense one"):
            gradients.average_gradients(towers)


class TestAddWeightDecay:
    def test_the_regularizers_gradients_are_added_to_dense_and_sparse_ones(self, session):
        start = np.arange(6, dtype=np.float32).reshape(3, 2) - 2

        def decayed(name, factor):
            return v1.get_variable(name, initializer=start, regularizer=lambda w: factor * tf.nn.l2_loss(w))

        dense_one, sparse_one, plain = decayed("dense", 0.5), decayed("sparse", 0.25), variable("plain")
        grads = [(tf.ones([3, 2]), dense_one), (slices([[1.0, 1.0], [2.0, 2.0]], [1, 1], 3), sparse_one)]
        total, added = gradients.add_weight_decay(
            [*grads, (tf.constant(7.0), plain)], v1.losses.get_regularization_losses()
        )
        session.run(v1.global_variables_initializer())
        loss, found = session.run([total, [tf.convert_to_tensor(grad) for grad, _ in added]])
        assert loss == pytest.approx((0.5 + 0.25) * np.sum(start**2) / 2)
        assert [v for _, v in added] == [dense_one, sparse_one, plain]
        np.testing.assert_allclose(found[0], 1 + 0.5 * start)
        np.testing.assert_allclose(found[1], [[0, 0], [3, 3], [0, 0]] + 0.25 * start)
        assert found[2] == 7.0


def test_finite_gradients_whose_mean_overflows_change_nothing(open_training):
    """The sum of two towers' gradients of 3e38 is no float32."""

    def inference(features, training):
        return features @ v1.get_variable("weights", [1, 2], initializer=v1.zeros_initializer())

    examples = Examples.from_arrays("large", np.full([4, 1], 3e38, np.float32), np.zeros(4, np.int32))
    workload = Workload("linear", None, inference, loss=lambda outputs, labels: tf.reduce_mean(outputs[:, 0]))
    with open_training(workload, examples, num_gpus=2, batch_size=2) as (built, session):
        report = session.run(built.report)
        assert not any(session.run(v1.trainable_variables())[0].ravel())
    assert np.all(report.finite[:-1]) and built.checked[0] == "the loss"
    assert report.finite[-1].tolist() == [True, False]
    assert (report.step, report.examples) == (0, 0)
