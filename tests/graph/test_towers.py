"""Towers are replicas on one set of variables, and how many there are shows nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings

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


@pytest.mark.parametrize("num_towers", [1, 3])
def test_names_of_variables_do_not_tell_of_towers(graph, num_towers):
    def loss(logits, labels):
        return tf.reduce_mean(logits) * v1.get_variable("temperature", [], initializer=v1.ones_initializer())

    built = build(two_layers, num_towers, loss=loss)
    assert [v.op.name for v in v1.global_variables()] == ["first/weights", "second/weights", "temperature"]
    for i, (_, loss) in enumerate(built):
        assert loss.op.name.startswith(f"tower_{i}/")


def test_a_variable_may_be_shared_within_a_tower(graph):
    def tied(features, training):
        for _ in range(2):
            with v1.variable_scope("layer", reuse=v1.AUTO_REUSE):
                features = features @ v1.get_variable("weights", [4, 4])
        return features

    build(tied, 2)
    assert len(v1.global_variables()) == 1


class TestInitialValues:
    def test_they_depend_on_the_seed_and_the_name_alone(self):
        """Not on towers, other operations, or an initializer that variables share; one with a seed keeps that."""

        def inference(features, training):
            with v1.variable_scope("net", initializer=v1.random_normal_initializer()):
                outputs = features @ v1.get_variable("a", [4, 4]) @ v1.get_variable("b", [4, 4])
            return outputs @ v1.get_variable("own", [4, 4], initializer=v1.random_normal_initializer(seed=5))

        alone, together, other = (
            {name: value.tobytes() for name, value in initial_values(inference, **options).items()}
            for options in (dict(num_towers=1), dict(num_towers=4, ops_before=17), dict(seed=1))
        )
        assert alone == together
        assert alone.pop("own") == other.pop("own")
        assert len({*alone.values(), *other.values()}) == 4

    def test_every_kind_of_initializer_that_get_variable_takes_works(self):
        """The default is get_variable's own, of Glorot and Bengio 2010: uniform within sqrt(6 / (fan in + fan out))."""
        expected = np.arange(16, dtype=np.float32).reshape(4, 4)

        def inference(features, training):
            v1.get_variable("array", initializer=expected)
            v1.get_variable("tensor", initializer=tf.constant(expected))
            v1.get_variable("number", initializer=0.0)
            v1.get_variable("function", [4, 4], initializer=lambda shape, dtype, partition_info: tf.ones(shape, dtype))
            v1.get_variable("whole", [], tf.int64)
            v1.get_variable("default", [400, 200])
            return features @ v1.get_variable("class", [4, 4], initializer=v1.ones_initializer)

        values, ones, limit = initial_values(inference), np.ones([4, 4]), np.sqrt(6 / 600)
        default = values.pop("default")
        for name, value in dict(array=expected, tensor=expected, function=ones, number=0, whole=0).items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        np.testing.assert_array_equal(values["class"], ones)
        assert np.max(np.abs(default)) <= limit
        assert np.std(default) == pytest.approx(limit / np.sqrt(3), rel=0.01)  # 6 deviations: 2e-9 of seeds


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
    def test_those_below_float32_compute_on_copies_of_float32_variables(self, dtype):
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
        with trainings.opened(Workload("toy", None, inference, loss), examples, **options) as (built, session):
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
