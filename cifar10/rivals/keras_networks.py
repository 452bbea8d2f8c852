"""Networks of this workload as Keras models, layer for layer: float32 images [batch, size, size, 3] to logits.

A layer's name is the variable scope of the network that it repeats, with dots instead of slashes.
"""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import layers

import cifar10
from cifar10 import augment, records, whitening

_INPUT = (records.IMAGE_SIZE, records.IMAGE_SIZE, records.CHANNELS)
WHITENING = "block1.conv1.whitening"  # name of the layer of cifar10_94 that awaits its kernels


def convnet() -> keras.Model:
    """Builds the network of cifar10.convnet, for images of 24 pixels each way."""

    def initial(stddev, bias):
        return {
            "kernel_initializer": keras.initializers.TruncatedNormal(stddev=stddev),
            "bias_initializer": keras.initializers.Constant(bias),
        }

    normalization = dict(depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    # tf.nn.l2_loss, which the published network uses, halves the sum.
    decay = keras.regularizers.L2(cifar10.convnet.WEIGHT_DECAY / 2)
    return keras.Sequential(
        [
            keras.Input([augment.CROP_SIZE, augment.CROP_SIZE, records.CHANNELS]),
            layers.Conv2D(64, 5, padding="same", activation="relu", name="conv1", **initial(5e-2, 0.0)),
            layers.MaxPooling2D(3, 2, "same"),
            layers.Lambda(tf.nn.lrn, arguments=normalization),
            layers.Conv2D(64, 5, padding="same", activation="relu", name="conv2", **initial(5e-2, 0.1)),
            layers.Lambda(tf.nn.lrn, arguments=normalization),
            layers.MaxPooling2D(3, 2, "same"),
            layers.Flatten(),
            layers.Dense(384, "relu", name="local3", kernel_regularizer=decay, **initial(0.04, 0.1)),
            layers.Dense(192, "relu", name="local4", kernel_regularizer=decay, **initial(0.04, 0.1)),
            layers.Dense(records.NUM_CLASSES, name="softmax_linear", **initial(1 / 192, 0.0)),
        ]
    )


def cifar10_94(widths: Sequence[int], head: float = 1.0, depth: int = 2) -> keras.Model:
    """Builds a network of cifar10.cifar10_94; its layer WHITENING waits for kernels from the images."""
    original = cifar10.cifar10_94
    bias_decay = keras.regularizers.L2(original.DECAY / original.BIAS_RATE / 2)
    head_decay = keras.regularizers.L2(original.DECAY / original.head_rate(widths[-1], head) / 2)

    def initial(inputs):
        return keras.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)

    maps = inputs = keras.Input(_INPUT)
    maps = Whitening(bias_decay, name=WHITENING)(maps)
    maps = layers.Activation(lambda x: keras.ops.silu(1.702 * x))(maps)  # GELU, up to a factor
    for block, width in enumerate(widths, start=1):
        activations = []
        for number in range(1, depth + 1):
            name = f"block{block}.conv{number}"
            maps = layers.Conv2D(
                width, 3, padding="same", use_bias=False, name=name, kernel_initializer=initial(9 * maps.shape[-1])
            )(maps)
            maps = layers.MaxPooling2D(2)(maps) if number == 1 else maps
            maps = layers.BatchNormalization(
                momentum=original.MOVING_MOMENTUM,
                epsilon=1e-5,
                scale=False,
                beta_regularizer=bias_decay,
                name=f"{name}.batch_normalization",
            )(maps)
            if number == 3:
                maps = layers.add([maps, activations[0]])
            maps = layers.Activation("silu")(maps)
            activations.append(maps)
    features = layers.Flatten()(layers.MaxPooling2D(3)(maps))
    kernels = dict(kernel_regularizer=head_decay, kernel_initializer=initial(features.shape[-1]))
    logits = layers.Dense(records.NUM_CLASSES, use_bias=False, name="head", **kernels)(features)
    return keras.Model(inputs, layers.Rescaling(original.LOGIT_SCALE, dtype="float32")(logits))


class Whitening(layers.Layer):
    """A convolution whose kernels are not trained, while its biases are."""

    def __init__(self, decay: keras.regularizers.Regularizer, **kwargs):
        super().__init__(**kwargs)
        self._decay = decay

    def build(self, input_shape):
        shape = [whitening.SIZE, whitening.SIZE, input_shape[-1], whitening.NUM_KERNELS]
        self.kernel = self.add_weight(shape, name="kernel", trainable=False)
        self.bias = self.add_weight(shape[-1:], "zeros", name="bias", regularizer=self._decay)

    def call(self, inputs):
        return keras.ops.conv(inputs, self.kernel, padding="valid") + self.bias


NETWORKS = {"convnet": convnet} | {
    name: functools.partial(cifar10_94, **network) for name, network in cifar10.cifar10_94.NETWORKS.items()
}
