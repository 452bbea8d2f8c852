"""Towers are replicas on one set of variables, and how many there are shows nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tower_train.errors import GraphError
from tower_train.graph import towers
from tower_train.graph.layout import Tower
from tower_train.graph.variables import Variables
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


def build(inference, num_towers=2, seed=0, loss=None, ops_before=0, features=None, dtype=tf.float32):
    """Towers on the CPU, two examples each, in the default graph."""
    for _ in range(ops_before):
        tf.constant(0)
    batch = (tf.ones([2, 4]) if features is None else features, tf.zeros([2], tf.int32))
    workload = Workload("toy", None, inference, **({"loss": loss} if loss else {}))
    variables, built = Variables(), []
    for i in range(num_towers):
        with variables.tower(Tower(i, "/cpu:0"), towers.seeded(seed)):
            built.append(towers.tower_loss(workload, *batch, dtype))
    return built


def initial_values(inference, **options):
    with tf.Graph().as_default(), v1.Session() as session:
        build(inference, **options)
        session.run(v1.global_variables_initializer())
        return session.run({variable.op.name: variable for variable in v1.global_variables()})


def two_layers(features, training):
    with v1.variable_scope("first"):
        hidden = features @ v1.get_variable("weights", [4, 4])
    return hidden @ v1.get_variable("second/weights", [4, 4], initializer=v1.truncated_normal_initializer)


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


class TestVariables:
    @pytest.mark.parametrize("num_towers", [1, 3])
    def test_their_names_do_not_tell_of_towers(self, graph, num_towers):
        built = build(two_layers, num_towers)
        assert [variable.op.name for variable in v1.global_variables()] == ["first/weights", "second/weights"]
        for i, (_, loss) in enumerate(built):
            assert loss.op.name.startswith(f"tower_{i}/")

    def test_every_tower_computes_with_the_same_ones(self, graph):
        built = build(two_layers, 3)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            losses = [loss for _, loss in built]
            before = session.run(losses)
            session.run([variable.assign(variable + 1.0) for variable in v1.global_variables()])
            after = session.run(losses)
        assert before[0] == before[1] == before[2] != after[0] == after[1] == after[2]

    def test_a_variable_is_shared_within_a_tower_only_if_it_says_so(self):
        def tied(features, training):
            for _ in range(2):
                with v1.variable_scope("layer", reuse=reuse):
                    features = features @ v1.get_variable("weights", [4, 4])
            return features

        reuse, message = None, "^layer/weights exists already: a second layer would share its weights"
        with tf.Graph().as_default(), pytest.raises(GraphError, match=message):
            build(tied)
        reuse = v1.AUTO_REUSE
        with tf.Graph().as_default():
            build(tied, 2)
            assert len(v1.global_variables()) == 1

    def test_one_that_a_later_get_variable_would_create_is_named(self, graph):
        calls = []

        def inference(features, training):
            calls.append(None)
            return features @ v1.get_variable(f"layer_{len(calls)}/weights", [4, 4])

        with pytest.raises(GraphError, match="^tower_1 would create the variable 'layer_2/weights'"):
            build(inference)

    @pytest.mark.parametrize(("name", "text"), [("kernel", "the variable 'kernel'"), (None, "a variable without a n")])
    def test_one_that_tf_variable_creates_is_named(self, graph, name, text):
        with pytest.raises(GraphError, match=f"^tower_1 would create {text}.*tf.compat.v1.get_variable"):
            build(lambda features, training: features @ tf.Variable(tf.ones([4, 4]), name=name))

    def test_variables_of_the_loss_are_shared_too(self, graph):
        def loss(logits, labels):
            return tf.reduce_mean(logits) * v1.get_variable("temperature", [], initializer=v1.ones_initializer())

        build(two_layers, 3, loss=loss)
        assert [v.op.name for v in v1.global_variables()] == ["first/weights", "second/weights", "temperature"]


class TestInitialValues:
    def test_they_do_not_depend_on_the_number_of_towers_nor_on_other_ops(self):
        alone = initial_values(two_layers, num_towers=1)
        together = initial_values(two_layers, num_towers=4, ops_before=17)
        assert {name: value.tolist() for name, value in alone.items()} == {
            name: value.tolist() for name, value in together.items()
        }

    def test_they_differ_between_seeds_and_between_variables(self):
        zero, one = initial_values(two_layers, seed=0), initial_values(two_layers, seed=1)
        values = [*zero.values(), *one.values()]
        assert len({value.tobytes() for value in values}) == 4

    def test_variables_that_share_an_initializer_object_start_differently(self):
        def inference(features, training):
            with v1.variable_scope("net", initializer=v1.random_normal_initializer()):
                return features @ v1.get_variable("a", [4, 4]) @ v1.get_variable("b", [4, 4])

        values = initial_values(inference)
        assert not np.array_equal(values["net/a"], values["net/b"])

    def test_an_initializers_own_seed_is_kept(self):
        def inference(features, training):
            return features @ v1.get_variable("a", [4, 4], initializer=v1.random_normal_initializer(seed=5))

        np.testing.assert_array_equal(initial_values(inference, seed=0)["a"], initial_values(inference, seed=1)["a"])

    def test_every_kind_of_initializer_that_get_variable_takes_works(self):
        expected = np.arange(16, dtype=np.float32).reshape(4, 4)

        def inference(features, training):
            v1.get_variable("array", initializer=expected)
            v1.get_variable("tensor", initializer=tf.constant(expected))
            v1.get_variable("number", initializer=0.0)
            v1.get_variable("function", [4, 4], initializer=lambda shape, dtype, partition_info: tf.ones(shape, dtype))
            v1.get_variable("whole", [], tf.int64)
            return features @ v1.get_variable("class", [4, 4], initializer=v1.ones_initializer)

        values = initial_values(inference)
        np.testing.assert_array_equal(values["array"], expected)
        np.testing.assert_array_equal(values["tensor"], expected)
        np.testing.assert_array_equal(values["function"], np.ones([4, 4]))
        np.testing.assert_array_equal(values["class"], np.ones([4, 4]))
        assert values["number"] == 0 and values["whole"] == 0

    def test_the_default_is_get_variables_own(self):
        """Glorot and Bengio 2010: uniform within sqrt(6 / (fan in + fan out))."""

        def inference(features, training):
            v1.get_variable("wide", [400, 200])
            return features @ v1.get_variable("w", [4, 4])

        wide, limit = initial_values(inference)["wide"], np.sqrt(6 / 600)
        assert np.max(np.abs(wide)) <= limit
        assert np.std(wide) == pytest.approx(limit / np.sqrt(3), rel=0.01)  # 6 deviations: 2e-9 of seeds


class TestLoss:
    @pytest.mark.parametrize("num_towers", [1, 3])
    def test_a_regularizer_counts_once_however_many_towers_there_are(self, open_training, num_towers):
        def inference(features, training):
            weights = v1.get_variable(
                "weights", [2, 2], initializer=v1.constant_initializer([1.0, 2.0, 3.0, 4.0]),
                regularizer=lambda w: 0.25 * tf.nn.l2_loss(w),
            )  # fmt: skip
            return features @ weights

        examples = Examples.from_arrays("zeros", np.zeros([6, 2], np.float32), np.zeros(6, np.int32))
        options = {"num_gpus": num_towers, "batch_size": 2, "learning_rate": 0.5}
        with open_training(Workload("toy", None, inference), examples, **options) as (built, session):
            report = session.run(built.report)
            [weights] = session.run(v1.trainable_variables())
        start = np.array([[1.0, 2.0], [3.0, 4.0]])
        # The features are 0: the cross-entropy is log 2 and has no gradient.
        assert report.loss == pytest.approx(np.log(2) + 0.25 * np.sum(start**2) / 2)
        np.testing.assert_allclose(weights, start - 0.5 * 0.25 * start, rtol=1e-6)


class TestDtype:
    @pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16, tf.float16])
    def test_floating_point_features_are_cast_and_others_are_left_alone(self, graph, dtype):
        seen = {}

        def inference(features, training):
            seen.update({name: tensor.dtype for name, tensor in features.items()})
            return features["image"]

        build(inference, features={"image": tf.ones([2, 4], tf.float16), "index": tf.zeros([2], tf.int64)}, dtype=dtype)
        assert seen == {"image": dtype, "index": tf.int64}

    @pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
    def test_those_below_float32_compute_on_copies_of_float32_variables(self, open_training, dtype):
        """A step of 2^-12 is lost where numbers below 1 lie 2^-8 or 2^-11 apart, and kept in float32."""
        seen = []

        def inference(features, training):
            weights = v1.get_variable("weights", [1, 1], features.dtype, v1.ones_initializer())
            seen.append((features.dtype, weights.dtype))
            return features @ weights

        def loss(outputs, labels):
            return tf.reduce_mean(outputs)  # its gradient is the mean of the features

        examples = Examples.from_arrays("ones", np.ones([4, 1], np.float32), np.zeros(4, np.int32))
        options = {"num_gpus": 2, "batch_size": 2, "learning_rate": 2.0**-12, "dtype": dtype.name}
        with open_training(Workload("toy", None, inference, loss), examples, **options) as (built, session):
            report = session.run(built.report)
            [weights] = v1.trainable_variables()
            assert session.run(weights) == 1 - 2.0**-12
        assert weights.dtype == tf.float32
        assert report.loss.dtype == np.float32 and report.loss == 1
        assert seen == 2 * [(dtype, dtype)]


BINARY = keras.losses.BinaryCrossentropy
LATE = "it ends by a {}, but the loss takes logits"


@pytest.mark.parametrize(
    ("activation", "loss", "words"),
    [
        (tf.nn.softmax, None, LATE.format("softmax")),
        (tf.nn.sigmoid, None, LATE.format("sigmoid")),
        (tf.nn.sigmoid, BINARY(from_logits=True), LATE.format("sigmoid")),
        (tf.identity, BINARY(), "ends without a softmax or sigmoid, but the loss takes probabilities"),
        (tf.nn.relu, None, None),
        (tf.nn.sigmoid, BINARY(), None),
        (tf.nn.softmax, lambda outputs, labels: tf.reduce_mean(outputs), None),
    ],
)
def test_an_activation_that_does_not_fit_the_loss_is_noticed(activation, loss, words):
    workload = Workload("toy", None, lambda x, training: activation(x), **({"loss": loss} if loss else {}))
    with tf.Graph().as_default():
        outputs = towers.tower_outputs(workload, v1.placeholder(tf.float32, [2, 4]), tf.bfloat16, training=True)
        notes = towers.activation_notes(workload, outputs)
    assert [words in note for note in notes] == [True] * (words is not None)
