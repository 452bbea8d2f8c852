"""The deeper networks: their sizes and their crops."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import values
from draws import GivenDraws

import cifar10
from cifar10 import crops

v1 = tf.compat.v1

# Weights and biases. ResNets: 0.27 and 0.85 million in He et al. 2015, table 6. The Keras tutorial's MiniGoogLeNet has
# 1,656,250, which counts a bias and two moving statistics for each of 1,712 normalised channels.
PARAMETERS = {"resnet20": 269_722, "resnet56": 853_018, "minigooglenet": 1_656_250 - 3 * 1_712}


@functools.cache
def model(name):
    return cifar10.WORKLOAD.with_options({"model": name})


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_published_size(name):
    with tf.Graph().as_default():
        logits = model(name).inference(tf.zeros([2, 32, 32, 3]), True)
        count = sum(np.prod(variable.shape.as_list()) for variable in v1.trainable_variables())
        layers = [v for v in v1.trainable_variables() if v.op.name.endswith("/weights")]
    assert logits.shape == (2, 10)
    assert count == PARAMETERS[name]
    if name.startswith("resnet"):
        assert len(layers) == int(name.removeprefix("resnet"))


def test_crops_are_those_of_the_padded_image():
    """All 81 places, flipped and not, and the least and greatest numbers, against numpy."""
    images = np.random.default_rng(0).integers(0, 256, [2, 32, 32, 3], np.uint8)
    places = [(row, column, flip, k) for row in range(9) for column in range(9) for flip in (0, 1) for k in (0, 1)]
    numbers = [((row + 0.5) / 9, (column + 0.5) / 9, 0.75 - 0.5 * flip) for row, column, flip, _ in places]
    places, numbers = [*places, (0, 0, 1, 0), (8, 8, 0, 1)], [*numbers, (0, 0, 0), (1 - 2**-24,) * 3]
    found = values.of(lambda x: crops.augment(x, GivenDraws(numbers)), images[[k for *_, k in places]])
    normal = (images.astype(np.float64) - crops.MEAN) / crops.DEVIATION
    padded = np.pad(normal, [(0, 0), (4, 4), (4, 4), (0, 0)])
    for crop, (row, column, flip, k) in zip(found, places, strict=True):
        expected = padded[k, row : row + 32, column : column + 32]
        np.testing.assert_allclose(crop, expected[:, ::-1] if flip else expected, atol=1e-5, err_msg=f"{row} {column}")
