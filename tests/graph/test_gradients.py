"""The towers' gradients become one mean, which is applied only where everything is finite."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train.errors import GraphError
from tower_train.graph import gradients, optimizers, update
from tower_train.graph.draws import shuffled_indices
from tower_train.graph.replica import Replica
from tower_train.graph.variables import Variables
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

    def test_no_towers_are_refused(self):
        with pytest.raises(GraphError, match="got no towers"):
            gradients.average_gradients([])

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

    def test_variables_of_one_name_are_told_apart(self):
        a, b, one = tf.Variable(1.0), tf.Variable(2.0), tf.constant(1.0)
        assert a.name == b.name
        with pytest.raises(GraphError, match="tower_1 and tower_0 .* another order"):
            gradients.average_gradients([[(one, a), (one, b)], [(one, b), (one, a)]])

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


class GuardedUpdate:
    """Two towers, variables `a` [2] and the sparsely trained `b` [3, 1], all their gradients fed."""

    CHECKED = ["the loss", "a", "b"]  # columns of the flags

    def __init__(self):
        a, b = variable("a", 2), variable("b", 3, 1)
        self.losses = v1.placeholder(tf.float32, [2])
        self.a = [v1.placeholder(tf.float32, [2]) for _ in range(2)]
        self.b = [v1.placeholder(tf.float32, [2, 1]) for _ in range(2)]
        towers = [
            [(grad_a, a), (tf.IndexedSlices(grad_b, tf.constant([0, 2]), tf.constant([3, 1])), b)]
            for grad_a, grad_b in zip(self.a, self.b, strict=True)
        ]
        counters = update.Counters(global_batch=1)
        replica, optimizer = Replica(Variables()), optimizers.make_optimizer("momentum", tf.constant(0.1), 0.5)
        mean = replica.mean_grads = gradients.average_gradients(towers)
        build = update.prepare_update(replica, lambda *_: optimizer, {}, 0.5, counters.global_step)

        def apply():
            with tf.control_dependencies([build()]):
                return counters.count()

        self.finite = gradients.update_if_finite(
            zip(tf.unstack(self.losses), towers, strict=True), mean, tf.reduce_mean(self.losses),
            apply,
        )  # fmt: skip
        self.session = v1.get_default_session()
        self.session.run(v1.global_variables_initializer())

    def step(self, losses=(1, 1), a=((1, 1), (1, 1)), b=((1, 1), (1, 1))):
        feed = {self.losses: losses} | dict(zip(self.a, a, strict=True))
        feed |= {place: np.reshape(values, [2, 1]) for place, values in zip(self.b, b, strict=True)}
        return self.session.run(self.finite, feed)

    def values(self):
        """Everything there is: weights, momentum, moving averages, global_step."""
        return self.session.run({variable.op.name: variable for variable in v1.global_variables()})


def changed(before, after):
    return {name for name in before if before[name].tobytes() != after[name].tobytes()}


class TestUpdateIfFinite:
    @pytest.fixture
    def guarded(self, session):
        guarded = GuardedUpdate()
        guarded.step()
        return guarded

    def test_a_finite_step_changes_every_variable_and_all_flags_are_true(self, guarded):
        before = guarded.values()
        flags = guarded.step()
        assert flags.shape == (3, 3) and flags.all()
        assert changed(before, guarded.values()) == before.keys()
        assert len(before) == 3 * 2 + 2

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("tower", [0, 1])
    @pytest.mark.parametrize("where", GuardedUpdate.CHECKED)
    def test_one_bad_number_in_one_tower_changes_nothing_and_is_named(self, guarded, where, tower, bad):
        before = guarded.values()
        inputs = {"losses": np.ones(2), "a": np.ones([2, 2]), "b": np.ones([2, 2])}
        inputs["losses" if where == "the loss" else where].reshape(2, -1)[tower, -1] = bad
        flags = guarded.step(**inputs)
        expected = np.ones([3, 3], bool)
        expected[[tower, 2], GuardedUpdate.CHECKED.index(where)] = False  # the mean, in the last row, is bad too
        np.testing.assert_array_equal(flags, expected)
        assert not changed(before, guarded.values())

    def test_finite_gradients_whose_mean_overflows_are_caught(self, guarded):
        before = guarded.values()
        largest = np.finfo(np.float32).max
        flags = guarded.step(a=([largest, 0], [largest, 0]))
        np.testing.assert_array_equal(flags, [[True, True, True], [True, True, True], [True, False, True]])
        assert not changed(before, guarded.values())

    def test_training_goes_on_after_a_refused_step_as_if_it_had_not_been(self, guarded):
        guarded.step(losses=(np.nan, 1))
        guarded.step()
        interrupted = guarded.values()
        with tf.Graph().as_default(), v1.Session():
            smooth = GuardedUpdate()
            smooth.step()
            smooth.step()
            assert not changed(smooth.values(), interrupted)


def test_the_tower_that_meets_a_bad_example_is_named(open_training):
    """In the training graph: flags in the order of `checked`, and nothing but the stream moves."""

    def inference(features, training):
        return features @ v1.get_variable("weights", [2, 2]) + v1.get_variable("biases", [2])

    seed, bad_example = 3, 5
    features = np.ones([12, 2], np.float32)
    features[bad_example, 0] = np.inf
    examples = Examples.from_arrays("one infinity", features, np.zeros(12, np.int32))
    workload = Workload("linear", None, inference)
    with open_training(workload, examples, num_gpus=3, batch_size=4, seed=seed) as (built, session):
        variables = {variable.op.name: variable for variable in built.saved.variables}
        shuffled = session.run(shuffled_indices(tf.range(12, dtype=tf.int64), 12, seed))
        before = session.run(variables)
        report = session.run(built.report)
        assert not changed(before, session.run(variables))
    tower = list(shuffled).index(bad_example) // 4
    assert built.checked[0] == "the loss"
    assert [tower] == [i for i, flags in enumerate(report.finite[:-1]) if not flags.all()]
    assert not report.finite[-1].all()
    assert report.step == 0 and report.examples == 0
