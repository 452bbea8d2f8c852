"""The network against a plain one of TensorFlow's own operations."""

import numpy as np
import plain_convnet
import pytest
import tensorflow as tf

from cifar10 import convnet

v1 = tf.compat.v1

SHAPES = {
    "conv1/weights": [5, 5, 3, 64],
    "conv1/biases": [64],
    "conv2/weights": [5, 5, 64, 64],
    "conv2/biases": [64],
    "local3/weights": [2304, 384],
    "local3/biases": [384],
    "local4/weights": [384, 192],
    "local4/biases": [192],
    "softmax_linear/weights": [192, 10],
    "softmax_linear/biases": [10],
}
BIASES = {"conv1": 0.0, "conv2": 0.1, "local3": 0.1, "local4": 0.1, "softmax_linear": 0.0}
DEVIATIONS = {"conv1": 5e-2, "conv2": 5e-2, "local3": 0.04, "local4": 0.04, "softmax_linear": 1 / 192}


def draw_images(count, dtype=np.float64):
    return np.random.default_rng(0).normal(size=[count, 24, 24, 3]).astype(dtype)


def by_name(variables):
    return {variable.op.name: variable for variable in variables}


def test_variables_have_the_tutorials_names_shapes_and_dtype():
    with tf.Graph().as_default():
        logits = convnet.inference(v1.placeholder(tf.float64, [None, 24, 24, 3]), True)
        variables = by_name(v1.global_variables())
        assert logits.shape.as_list() == [None, 10] and logits.dtype == tf.float64
        assert {name: v.shape.as_list() for name, v in variables.items()} == SHAPES
        assert {v.dtype.base_dtype for v in variables.values()} == {tf.float64}
        assert v1.trainable_variables() == v1.global_variables()
        assert sum(v.shape.num_elements() for v in variables.values()) == 1_068_298


def test_initial_values():
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(1)
        convnet.inference(tf.constant(draw_images(1, np.float32)), True)
        session.run(v1.global_variables_initializer())
        values = session.run(by_name(v1.global_variables()))
    for layer, bias in BIASES.items():
        weights, deviation = values[f"{layer}/weights"], DEVIATIONS[layer]
        np.testing.assert_array_equal(values[f"{layer}/biases"], np.float32(bias))
        assert abs(weights).max() <= 2 * deviation
        # A normal distribution cut off at two deviations has 0.8796 of its deviation.
        np.testing.assert_allclose(weights.std(), 0.8796 * deviation, rtol=0.05)  # 5 deviations of 4,800: 6e-7 of seeds


@pytest.fixture(scope="module")
def float64_step():
    """Two images' activations, logits and gradients; those of the plain network; all variables are drawn at random."""
    rng = np.random.default_rng(0)
    with tf.Graph().as_default(), v1.Session() as session:
        images = tf.constant(draw_images(2))
        logits = convnet.inference(images, True)
        variables = by_name(v1.global_variables())
        for name, variable in variables.items():
            layer = name.partition("/")[0]
            variable.load(2 * DEVIATIONS[layer] * rng.normal(size=variable.shape), session)
        logit_gradients = tf.constant(rng.normal(size=logits.shape))
        gradients = tf.gradients(logits, list(variables.values()), logit_gradients)
        plain = plain_convnet.activations(images, variables)
        expected = tf.gradients(plain["softmax_linear"], list(variables.values()), logit_gradients)
        graph = v1.get_default_graph()
        activations = {layer: graph.get_tensor_by_name(f"{layer}/{layer}:0") for layer in plain}
        yield session.run((activations, logits, gradients, plain, expected))


def test_activations_and_logits_equal_the_plain_network(float64_step):
    activations, logits, _, expected, _ = float64_step
    for layer, values in expected.items():
        np.testing.assert_allclose(activations[layer], values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(logits, expected["softmax_linear"], rtol=1e-9, atol=1e-12)


def test_gradients_equal_the_plain_network(float64_step):
    _, _, gradients, _, plain = float64_step
    for gradient, expected in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9 * abs(expected).max())
