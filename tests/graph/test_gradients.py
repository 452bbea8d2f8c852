"""The towers' gradients become one mean, which is applied only where everything is finite."""

import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train.errors import GraphError
from tower_train.graph import gradients
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


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
def test_towers_that_differ_are_refused_by_variable_and_tower(towers, text):
    """A letter is a variable, of which a capital has a sparse gradient; the hyphen is b without one."""
    with tf.Graph().as_default(), pytest.raises(GraphError, match=text):
        grads = {name: (tf.ones([3, 2]), v1.get_variable(name, [3, 2])) for name in "abc"}
        sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([2]), tf.constant([3, 2]))
        grads |= {"-": (None, grads["b"][1]), "B": (sparse, grads["b"][1])}
        gradients.average_gradients([[grads[letter] for letter in tower] for tower in towers])


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "tf.function"])
def test_plain_variables_of_programs_without_a_graph(wrap, capsys):
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
