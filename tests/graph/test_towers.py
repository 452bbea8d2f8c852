"""Towers are replicas on one set of variables, and how many there are shows nowhere else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train.graph import towers
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
COUNTERS = {"global_step", "examples_seen"}


def initial_values(inference, loss=None, **options):
    """{name: value} before the first step, but for counters; 12 examples of 4 features."""
    workload = Workload("toy", None, inference, **({"loss": loss} if loss else {}))
    examples = Examples.from_arrays("ones", np.ones([12, 4], np.float32), np.zeros(12, np.int32))
    values = trainings.train(workload, examples, 0, **(dict(batch_size=2, ema=0.0) | options))[1]
    assert values.keys() >= COUNTERS
    return {name: value for name, value in values.items() if name not in COUNTERS}


def test_names_of_variables_do_not_tell_of_towers():
    """Nor those of the loss; a layer may use its variables twice, if it says so, and have a getter of its own."""

    def by_position(getter, name, shape, dtype, initializer, regularizer, **more):
        return getter(name, shape, dtype, initializer, regularizer, **more)

    def network(features, training):
        for _ in range(2):
            with v1.variable_scope("layer", reuse=v1.AUTO_REUSE, custom_getter=by_position):
                features = features @ v1.get_variable("weights", [4, 4])
        return features

    def loss(logits, labels):
        scopes.append(logits.op.name.partition("/")[0])
        return tf.reduce_mean(logits) * v1.get_variable("temperature", [], initializer=v1.ones_initializer())

    scopes = []
    assert initial_values(network, loss, num_gpus=3).keys() == {"layer/weights", "temperature"}
    assert scopes == ["tower_0", "tower_1", "tower_2"]


def test_initial_values_depend_on_the_seed_and_the_name_alone():
    """Not on towers, other variables, or an initializer that variables share; one with a seed goes by that alone."""

    def network(features, training):
        with v1.variable_scope("net", initializer=v1.random_normal_initializer()):
            outputs = features @ v1.get_variable("a", [4, 4]) @ v1.get_variable("b", [4, 4])
        for name in ("own", "same"):
            outputs @= v1.get_variable(name, [4, 4], initializer=v1.random_normal_initializer(seed=5))
        for name, initializer in (("keras", keras.initializers.HeNormal), ("tf2", tf.random_normal_initializer)):
            outputs @= v1.get_variable(name, [4, 4], initializer=initializer())
        return outputs

    def after_another(features, training):
        return network(features @ v1.get_variable("z", [4, 4], initializer=tf.random_normal_initializer()), training)

    alone, together, other = (
        {name: value.tobytes() for name, value in initial_values(inference, **options).items()}
        for inference, options in ((network, {}), (after_another, dict(num_gpus=4)), (network, dict(seed=1)))
    )
    assert together.pop("z") and alone == together
    assert alone.pop("own") == alone.pop("same") and other.pop("own") == other.pop("same")
    assert len({*alone.values(), *other.values()}) == 8


def test_every_kind_of_initializer_that_get_variable_takes_works():
    """The default is get_variable's own, of Glorot and Bengio 2010: uniform within sqrt(6 / (fan in + fan out))."""
    array = np.arange(16, dtype=np.float32).reshape(4, 4)

    def network(features, training):
        v1.get_variable("array", initializer=array)
        v1.get_variable("tensor", initializer=tf.constant(array))
        v1.get_variable("number", initializer=0.0)
        v1.get_variable("function", [4, 4], initializer=lambda shape, dtype, partition_info: tf.ones(shape, dtype))
        v1.get_variable("whole", [], tf.int64)
        v1.get_variable("default", [400, 200])
        return features @ v1.get_variable("class", [4, 4], initializer=v1.ones_initializer)

    found, ones, limit = initial_values(network), np.ones([4, 4]), np.sqrt(6 / 600)
    for name, value in dict(array=array, tensor=array, function=ones, number=0, whole=0).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    np.testing.assert_array_equal(found["class"], ones)
    assert np.max(np.abs(found["default"])) <= limit
    assert np.std(found["default"]) == pytest.approx(limit / np.sqrt(3), rel=0.01)  # 6 deviations: 2e-9 of seeds


def test_floating_point_features_are_cast_and_variables_are_never_below_float32():
    """A step of 2^-12 is lost where numbers below 1 lie 2^-8 or 2^-11 apart, and kept in float32."""
    seen = []

    def network(features, training):
        weights = v1.get_variable("weights", [1, 1], features["ones"].dtype, v1.ones_initializer())
        seen.append([features["ones"].dtype, features["index"].dtype, weights.dtype])
        return features["ones"] @ weights

    features = {"ones": np.ones([4, 1], np.float16), "index": np.arange(4)}
    examples = Examples.from_arrays("ones", features, np.zeros(4, np.int32))
    options = dict(num_gpus=2, batch_size=2, learning_rate=2.0**-12, dtype="bfloat16")
    workload = Workload("toy", None, network, lambda outputs, labels: tf.reduce_mean(outputs))
    with trainings.opened(workload, examples, **options) as (built, session):
        report = session.run(built.report)
        [weights] = session.run(v1.trainable_variables())
    assert {weights.dtype, report.loss.dtype} == {np.dtype("float32")}
    assert (weights, report.loss) == (1 - 2.0**-12, 1)
    assert seen == 2 * [["bfloat16", "int64", "bfloat16"]]


BINARY = keras.losses.BinaryCrossentropy


@pytest.mark.parametrize(
    ("activation", "loss", "words"),
    [
        (tf.nn.softmax, None, "ends by a softmax, but the loss takes logits"),
        (tf.nn.sigmoid, BINARY(from_logits=True), "ends by a sigmoid, but the loss takes logits"),
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
