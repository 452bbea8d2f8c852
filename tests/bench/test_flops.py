"""The arithmetic of a network is what a person counts from its shapes."""

import pytest
import tensorflow as tf

from cifar10.rivals import port
from tower_train.bench import flops

v1 = tf.compat.v1


def variable(name, shape, trainable=True):
    return v1.get_variable(name, shape, trainable=trainable)


def counted(build):
    """The count of the sum of what `build` returns, in a graph of its own."""
    with tf.Graph().as_default():
        return flops.training_flops(tf.reduce_sum(build()))


def test_a_first_layer_has_no_gradient_of_its_input_and_a_second_has():
    def network():
        hidden = tf.nn.relu(v1.placeholder(tf.float32, [6, 5]) @ variable("first", [5, 3]))
        return hidden @ variable("second", [3, 4])

    assert counted(network) == 2 * (2 * 6 * 5 * 3) + 3 * (2 * 6 * 3 * 4)


@pytest.mark.parametrize("transposed", ["a", "b"])
def test_transposed_operands(transposed):
    def network():
        features = v1.placeholder(tf.float32, [5, 6] if transposed == "a" else [6, 5])
        weights = variable("w", [5, 3] if transposed == "a" else [3, 5])
        return tf.matmul(features, weights, transpose_a=transposed == "a", transpose_b=transposed == "b")

    assert counted(network) == 2 * (2 * 6 * 5 * 3)


def test_products_over_batches():
    def attention():  # both operands depend on trained variables
        queries = v1.placeholder(tf.float32, [4, 6, 5]) * variable("q", [5])
        keys = v1.placeholder(tf.float32, [4, 7, 5]) * variable("k", [5])
        return tf.matmul(queries, keys, transpose_b=True)

    assert counted(attention) == 3 * (2 * 4 * 6 * 7 * 5)


def test_strided_and_grouped_convolutions():
    def network():
        return tf.nn.conv2d(v1.placeholder(tf.float32, [2, 9, 9, 6]), variable("w", [3, 5, 3, 8]), 2, "SAME")

    assert counted(network) == 2 * (2 * (2 * 5 * 5 * 8) * (3 * 5 * 3))  # two groups of three channels


def test_depthwise_convolution():
    def network():
        images = v1.placeholder(tf.float32, [2, 9, 9, 6])
        return tf.nn.depthwise_conv2d(images, variable("w", [3, 3, 6, 2]), [1, 1, 1, 1], "VALID")

    assert counted(network) == 2 * (2 * (2 * 7 * 7 * 12) * (3 * 3))


def test_products_with_constants_are_not_counted():
    def network():
        hidden = v1.placeholder(tf.float32, [6, 5]) @ variable("w", [5, 3])
        return hidden @ tf.linalg.band_part(tf.ones([3, 3]), 1, 1)

    assert counted(network) == 2 * (2 * 6 * 5 * 3)


def test_frozen_layers_have_no_gradients():
    def network():
        hidden = v1.placeholder(tf.float32, [6, 5]) @ variable("frozen", [5, 3], trainable=False)
        return hidden @ variable("trained", [3, 4])

    assert counted(network) == (2 * 6 * 5 * 3) + 2 * (2 * 6 * 3 * 4)


def test_what_the_loss_does_not_need_is_not_counted():
    def network():
        features, weights = v1.placeholder(tf.float32, [6, 5]), variable("w", [5, 3])
        tf.square(features @ weights) @ variable("unused", [3, 9])
        return features @ weights

    assert counted(network) == 2 * (2 * 6 * 5 * 3)


def test_a_shape_that_is_not_known_is_an_error_that_names_the_product():
    with pytest.raises(ValueError, match="matmul.*not all known"):
        counted(lambda: v1.placeholder(tf.float32, [None, 5]) @ variable("w", [5, 3]))


def test_the_reference_network():
    """Two convolutions of 5 x 5 to 64 channels at 24 x 24 and 12 x 12, then 2304-384-192-10."""
    conv1, conv2 = 2 * 24 * 24 * 64 * (5 * 5 * 3), 2 * 12 * 12 * 64 * (5 * 5 * 64)
    dense = 2 * (6 * 6 * 64 * 384 + 384 * 192 + 192 * 10)
    batch = 4
    found = counted(lambda: port.inference(v1.placeholder(tf.float32, [batch, 24, 24, 3])))
    assert found == batch * (2 * conv1 + 3 * conv2 + 3 * dense)
    assert found / batch == pytest.approx(105.3e6, rel=1e-3)
