"""The towers' gradients become one mean, which is applied only where everything is finite."""

import numpy as np
import pytest
import tensorflow as tf
import trainings

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

    @pytest.mark.parametrize(
        ("towers", "text"),
        [
            (["ab", "a-", "ab", "a-"], "^b has no gradient in tower_1, tower_3 but has one"),
            (["ab", "ab", "ac"], "^tower_2 and tower_0 have gradients for different variables: b, c"),
            (["ab", "a"], "different variables: b"),
            (["ab", "ba"], "tower_1 and tower_0 .* another order"),
            (["ab", "aB"], "^b has a sparse gradient in some towers and a dense one"),
        ],
    )
    def test_towers_that_differ_are_refused_by_variable_and_tower(self, session, towers, text):
        """A letter is a variable, of which a capital has a sparse gradient; the hyphen is b without one."""
        variables = {name: variable(name, 3, 2) for name in "abc"}
        grads = {name: (tf.ones([3, 2]), each) for name, each in variables.items()}
        grads |= {"-": (None, variables["b"]), "B": (slices([[1.0, 2.0]], [2], 3), variables["b"])}
        with pytest.raises(GraphError, match=text):
            gradients.average_gradients([[grads[letter] for letter in tower] for tower in towers])


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
