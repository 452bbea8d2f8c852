"""Losses in TensorFlow 1's collections, and variables that networks assign themselves: once for all towers."""

import pytest
import tensorflow as tf
import toy_workload
import trainings
from tensorflow.python.layers import core

from tower_train import Workload
from tower_train.measures import softmax_cross_entropy
from tower_train.workload import DataRequest

v1 = tf.compat.v1


@pytest.mark.parametrize("update", ["cpu", "mirrored"])
def test_collected_losses_count_once(update):
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
    for inference in (declared, collected, of_layers):
        for loss in (softmax_cross_entropy, summed):
            trainings.assert_same(train(inference, loss, update), expected)


@pytest.mark.parametrize("options", [dict(), dict(num_gpus=2), dict(num_gpus=2, variable_update="mirrored")])
def test_what_a_network_assigns_is_the_mean_over_towers_once_a_step(options):
    def network(features, training):
        count = v1.get_variable("count", [], tf.int64, v1.zeros_initializer(), trainable=False)
        mean = v1.get_variable("mean", [4], features.dtype, v1.ones_initializer(), trainable=False)
        v1.assign_add(count, 1)
        mean.assign(0.5 * mean)
        assert mean.assign_add(0.5 * tf.reduce_mean(features, 0)).shape == [4]
        return features @ v1.get_variable("w", [4, 3], features.dtype)

    examples = toy_workload.load(DataRequest("train"))
    size = 96 // options.get("num_gpus", 1)  # all of them, each step
    _, variables = trainings.train(
        Workload("n", None, network), examples, 2, batch_size=size, dtype="float64", **options
    )
    of_all = examples.first(96)[0].astype("float64").mean(axis=0)
    assert variables["count"] == 2
    assert variables["mean"] == pytest.approx(0.25 + 0.75 * of_all, rel=1e-12)
