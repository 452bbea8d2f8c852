"""layers.gradient_until against numpy, and that it saves what it says it saves."""

import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train import layers
from tower_train.graph import context
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


@pytest.mark.parametrize("epochs_seen, is_early", [(0.0, True), (1.99, True), (2.0, False), (7.5, False)])
def test_early_weights_have_a_gradient_until_then(epochs_seen, is_early):
    computed = []

    @tf.custom_gradient
    def noted(x):
        def gradient(upstream):
            def note(value):
                computed.append(len(value))
                return value

            return tf.ensure_shape(tf.numpy_function(note, [upstream], upstream.dtype), upstream.shape)

        return tf.identity(x), gradient

    x, w, upstream = np.array([1.0, -2.0, 3.0]), np.array([0.5, 2.0, -1.0]), np.array([1.0, 10.0, 100.0])
    with tf.Graph().as_default(), v1.Session() as session:
        early, late = tf.constant(x), tf.constant(w)
        with context.entered(context.Context(epochs_seen=tf.constant(epochs_seen, tf.float64))):
            outputs = layers.gradient_until(2, lambda e, w: tf.square(noted(e)) * w, early, late)
        found = session.run([outputs, *tf.gradients(outputs, [early, late], tf.constant(upstream))])
    np.testing.assert_allclose(found[0], x**2 * w)
    np.testing.assert_allclose(found[1], 2 * x * w * upstream * is_early)
    np.testing.assert_allclose(found[2], x**2 * upstream)
    assert len(computed) == is_early


def test_outside_of_training_it_is_the_function():
    with tf.Graph().as_default(), v1.Session() as session:
        early, late = tf.constant(3.0), tf.constant(5.0)
        outputs = layers.gradient_until(2, tf.multiply, early, late)
        assert session.run([outputs, *tf.gradients(outputs, [early, late])]) == [15, 5, 3]


def test_mirrored_towers_train_what_towers_on_the_cpu_train():
    def network(features, training):
        with layers.param_group(until_epoch=1):
            early = v1.get_variable("early", [4], features.dtype)
        with layers.frozen():
            hidden = features * v1.get_variable("frozen", [4], features.dtype)

        def function(early, late):
            return tf.tanh(hidden * v1.get_variable("inner", [4], features.dtype) + early) @ late

        return layers.gradient_until(1, function, early, v1.get_variable("late", [4, 3], features.dtype))

    rng = np.random.default_rng(0)
    examples = Examples.from_arrays("e", rng.normal(size=[8, 4]), rng.integers(3, size=8).astype(np.int32))
    workload = Workload("early", lambda request: None, network)
    options = dict(num_gpus=2, batch_size=2, dtype="float64", learning_rate=0.5)
    mirrored = trainings.train(workload, examples, 4, variable_update="mirrored", **options)
    trainings.assert_same(mirrored, trainings.train(workload, examples, 4, **options))
