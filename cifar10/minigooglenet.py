"""MiniGoogLeNet: Inception-style modules with batch normalisation, for CIFAR-10.

The small Inception of Zhang et al. 2017, "Understanding deep learning requires rethinking generalization", appendix A,
which the well-known multi-GPU Keras tutorial trains. There is no dropout.
"""

import tensorflow as tf

from tower_train import layers

v1 = tf.compat.v1

NUM_CLASSES = 10
WEIGHT_DECAY = 5e-4
_INITIALIZER = v1.variance_scaling_initializer(2.0)
# By stage: the modules' (1 x 1, 3 x 3) channels, and the channels of the convolution that halves the picture.
STAGES = [([(32, 32), (32, 48)], 80), ([(112, 48), (96, 64), (80, 80), (48, 96)], 96), ([(176, 160), (176, 160)], None)]

# The tutorial's 70 epochs with momentum and a rate that falls linearly to 0. Zhang et al., table 1, report 89.0 % on
# the test images with random crops and weight decay.
RECIPE = {
    "optimizer": "momentum",
    "momentum": 0.9,
    "learning_rate": 0.05,
    "lr_schedule": "linear",
    "batch_size": 64,
    "epochs": 70.0,
    "ema": 0.0,
}


def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
    """Builds the network: images [batch, 32, 32, 3] to logits [batch, 10], all in the dtype of the images."""
    maps = _convolution("conv1", images, 96, 3, training)
    for i, (modules, halving) in enumerate(STAGES, start=1):
        for j, (ones, threes) in enumerate(modules, start=1):
            with v1.variable_scope(f"stage{i}/inception{j}"):
                maps = tf.concat(
                    [_convolution("one", maps, ones, 1, training), _convolution("three", maps, threes, 3, training)], -1
                )
        if halving:
            with v1.variable_scope(f"stage{i}/downsample"):
                pooled = tf.nn.max_pool2d(maps, ksize=3, strides=2, padding="VALID")
                halved = _convolution("three", maps, halving, 3, training, stride=2, padding="VALID")
                maps = tf.concat([halved, pooled], -1)
    features = tf.reduce_mean(maps, axis=[1, 2])
    with v1.variable_scope("softmax_linear"):
        return layers.affine(features, NUM_CLASSES, _INITIALIZER, WEIGHT_DECAY)


def _convolution(name: str, maps, channels: int, width: int, training: bool, stride: int = 1, padding: str = "SAME"):
    """Applies a convolution, batch normalisation and relu."""
    with v1.variable_scope(name):
        weights = layers.weights([width, width, maps.shape[-1], channels], maps.dtype, _INITIALIZER, WEIGHT_DECAY)
        products = tf.nn.conv2d(maps, weights, strides=stride, padding=padding)
        return tf.nn.relu(layers.batch_normalization(products, training))
