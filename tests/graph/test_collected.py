"""Losses in TensorFlow 1's collections, and variables that networks assign themselves: once for all towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings
from tensorflow.python.layers import core

from tower_train import Workload, keras_network
from tower_train.measures import softmax_cross_entropy
from tower_train.workload import DataRequest

v1 = tf.compat.v1


def test_collected_losses_count_once():
    """As regularizer=, by hand in the collection, by slim's kind of layers; also summed up in the loss."""

    def decay(weights):
        return 0.1 * tf.reduce_sum(weights**2)

    def network(features, **kwargs):
        return features @ v1.get_variable("w/kernel", [4, 3], features.dtype, **kwargs)

    def declared(features, training):
        return network(features, regularizer=decay)

    def collected(features, training):
        outputs = network(features)
        with v1.variable_scope("", reuse=True):
            weights = v1.get_variable("w/kernel", [4, 3], features.dtype)
        v1.losses.add_loss(decay(weights), v1.GraphKeys.REGULARIZATION_LOSSES)
        return outputs

    def of_layers(features, training):
        """The second layer has the first one's weights, and no part in the outputs."""
        about = dict(use_bias=False, kernel_initializer=v1.glorot_uniform_initializer(), kernel_regularizer=decay)
        about |= dict(name="w", dtype=features.dtype)
        first, second = (core.Dense(3, **about, _reuse=reuse)(features) for reuse in (None, True))
        return first + 0 * second

    def summed(outputs, labels):
        return softmax_cross_entropy(outputs, labels) + v1.losses.get_regularization_loss()

    def train(inference, loss, update):
        workload, examples = Workload("n", None, inference, loss), toy_workload.load(DataRequest("train"))
        return trainings.train(workload, examples, 3, variable_update=update, num_gpus=2, batch_size=4, dtype="float64")

    expected = train(declared, softmax_cross_entropy, "cpu")
    for inference, loss, update in (
        (declared, summed, "mirrored"),
        (collected, softmax_cross_entropy, "mirrored"),
        (of_layers, summed, "cpu"),
    ):
        trainings.assert_same(train(inference, loss, update), expected)


@pytest.mark.parametrize("update", ["cpu", "mirrored"])
def test_what_a_network_assigns_is_the_mean_over_towers_once_a_step(update):
    def network(features, training):
        count = v1.get_variable("count", [], tf.int64, v1.zeros_initializer(), trainable=False)
        mean = v1.get_variable("mean", [4], features.dtype, v1.ones_initializer(), trainable=False)
        v1.assign_add(count, 1)
        mean.assign(0.5 * mean)
        assert mean.assign_add(0.5 * tf.reduce_mean(features, 0)).shape == [4]
        return features @ v1.get_variable("w", [4, 3], features.dtype)

    examples = toy_workload.load(DataRequest("train"))
    options = dict(num_gpus=2, batch_size=48, dtype="float64", variable_update=update)  # all of them, each step
    _, variables = trainings.train(Workload("n", None, network), examples, 2, **options)
    of_all = examples.first(96)[0].astype("float64").mean(axis=0)
    assert variables["count"] == 2
    assert variables["mean"] == pytest.approx(0.25 + 0.75 * of_all, rel=1e-12)


def of_trainable(features, training):
    """L2 over all trained variables, and over a collection that the network fills, as TensorFlow 1's tutorials do."""
    kernel = v1.get_variable("w/kernel", [4, 3], features.dtype)
    v1.add_to_collection("decayed", kernel)
    found = [*v1.trainable_variables(), *v1.get_collection("decayed")]
    assert len(found) == 2
    return features @ kernel + 0.1 * tf.add_n([tf.nn.l2_loss(each) for each in found])


def of_teacher(features, training):
    """A moving average by the variable's name, and values from which variables begin, with their dtypes."""
    kernel, average = v1.get_variable("w", [4, 3], features.dtype), tf.train.ExponentialMovingAverage(0.9, name="slow")
    steps = v1.get_variable("steps", initializer=0, trainable=False)
    half = v1.get_variable("half", initializer=0.5, trainable=False)
    steps.assign_add(1)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.apply([kernel]))
    assert steps.dtype == tf.int32 and half.dtype == tf.float32
    return features @ kernel + tf.cast(half, features.dtype) * tf.stop_gradient(features @ average.average(kernel))


@pytest.mark.parametrize("network", [of_trainable, of_teacher])
def test_towers_find_their_own_copies_in_collections_and_by_name(network):
    def train(**options):
        workload, examples = Workload("n", None, network), toy_workload.load(DataRequest("train"))
        return trainings.train(workload, examples, 3, dtype="float64", **options)

    trainings.assert_same(train(num_gpus=2, batch_size=4, variable_update="mirrored"), train(batch_size=8))


def followed(features, training):
    kernels = [v1.get_variable(f"w{i}", [4, 3], features.dtype) for i in range(16)]
    for i, kernel in enumerate(kernels):
        v1.get_variable(f"slow{i}", [4, 3], features.dtype, trainable=False).assign(1 * kernel)
    return features @ tf.add_n(kernels)


class Halving(keras.layers.Layer):
    """Assigns weights that are trained, as Keras' SpectralNormalization does."""

    def build(self, shape):
        self.kernels = [self.add_weight((shape[-1], 3), name=f"w{i}") for i in range(16)]

    def call(self, inputs):
        for kernel in self.kernels:
            kernel.assign(0.5 * kernel)
        return inputs @ sum(self.kernels)


@pytest.mark.parametrize(
    ("network", "factor"),
    [(followed, 1), (keras_network(lambda: keras.Sequential([keras.Input([4]), Halving()])), 0.5)],
)
def test_states_follow_weights_before_their_update_which_comes_after_what_layers_assign(network, factor):
    """Sixteen variables of 40 steps each, as the order of two operations is chance."""
    workload, examples = Workload("n", None, network), toy_workload.load(DataRequest("train"))
    with trainings.opened(workload, examples, batch_size=8, learning_rate=0.5, optimizer="sgd") as (built, session):
        weights = [v.op.name for v in built.saved.variables if v.trainable]
        for _ in range(40):
            before = trainings.snapshot(built, session)
            session.run(built.report)
            after = trainings.snapshot(built, session)
            assert all((after[f"slow{i}"] == before[f"w{i}"]).all() for i in range(16) if network is followed)
            moves = [after[name] - factor * before[name] for name in weights]  # all have one gradient
            assert len(moves) == 16 and np.abs(moves).max() > 1e-6 and np.ptp(moves, axis=0).max() < 1e-6
