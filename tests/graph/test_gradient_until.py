"""layers.gradient_until against numpy, and that it saves what it says it saves."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train import layers
from tower_train.graph import context

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
