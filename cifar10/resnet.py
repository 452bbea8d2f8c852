"""Residual networks for CIFAR-10: He et al. 2015, "Deep residual learning for image recognition", section 4.2.

A convolution, three stages of n blocks of two convolutions each, with 16, 32 and 64 channels at 32, 16 and 8 pixels,
the mean over the picture and a softmax layer: 6n + 2 layers. Shortcuts have no parameters (the paper's option A).
"""

import functools

import tensorflow as tf

from tower_train import layers

v1 = tf.compat.v1

NUM_CLASSES = 10
WEIGHT_DECAY = 1e-4
# The variance 2 / inputs: He et al. 2015, "Delving deep into rectifiers", section 2.2.
_INITIALIZER = v1.variance_scaling_initializer(2.0, distribution="untruncated_normal")

# Section 4.2: momentum 0.9, 0.1 divided by 10 after 32,000 and 48,000 of 64,000 steps of 128 (81.9, 122.9 and 163.8
# epochs). The paper's test error: 8.75 % with 20 layers, 6.97 % with 56.
RECIPE = {
    "optimizer": "momentum",
    "momentum": 0.9,
    "learning_rate": 0.1,
    "lr_schedule": "piecewise",
    "lr_boundaries": (82, 123),
    "learning_rate_decay_factor": 0.1,
    "batch_size": 128,
    "epochs": 164.0,
    "ema": 0.0,
}


def inference(images: tf.Tensor, training: bool, depth: int) -> tf.Tensor:
    """Builds the network: images [batch, 32, 32, 3] to logits [batch, 10], all in the dtype of the images."""
    with v1.variable_scope("conv1"):
        maps = tf.nn.relu(_normalized_convolution(images, 16, 1, training))
    for stage, channels in enumerate((16, 32, 64), start=1):
        for block in range(1, (depth - 2) // 6 + 1):
            with v1.variable_scope(f"stage{stage}/block{block}"):
                maps = _block(maps, channels, 2 if stage > 1 and block == 1 else 1, training)
    features = tf.reduce_mean(maps, axis=[1, 2])
    with v1.variable_scope("softmax_linear"):
        return layers.affine(features, NUM_CLASSES, _INITIALIZER, WEIGHT_DECAY)


resnet20 = functools.partial(inference, depth=20)
resnet56 = functools.partial(inference, depth=56)


def _block(maps, channels: int, stride: int, training: bool):
    """Applies two convolutions, and the shortcut around them: every other pixel, and zeros for new channels."""
    with v1.variable_scope("conv1"):
        inner = tf.nn.relu(_normalized_convolution(maps, channels, stride, training))
    with v1.variable_scope("conv2"):
        inner = _normalized_convolution(inner, channels, 1, training)
    shortcut = maps[:, ::stride, ::stride] if stride > 1 else maps
    new = channels - maps.shape[-1]
    if new:
        shortcut = tf.pad(shortcut, [[0, 0], [0, 0], [0, 0], [new // 2, new - new // 2]])
    return tf.nn.relu(inner + shortcut)


def _normalized_convolution(maps, channels: int, stride: int, training: bool):
    weights = layers.weights([3, 3, maps.shape[-1], channels], maps.dtype, _INITIALIZER, WEIGHT_DECAY)
    return layers.batch_normalization(tf.nn.conv2d(maps, weights, strides=stride, padding="SAME"), training)
