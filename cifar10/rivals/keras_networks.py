"""The deeper networks of this workload as Keras models, layer for layer: float32 images [batch, 32, 32, 3] to logits.

A layer's name is the variable scope of the network that it repeats, with dots for slashes.
"""

import keras
from keras import layers

from cifar10 import cifar10_94 as original
from cifar10 import resnet, whitening
from cifar10.minigooglenet import WEIGHT_DECAY as MINIGOOGLENET_DECAY

_INPUT = (32, 32, 3)
WHITENING = "block1.conv1.whitening"  # name of the layer of cifar10_94 that awaits its kernels


def resnet20() -> keras.Model:
    """The network of cifar10.resnet with 20 layers."""
    return _resnet(20)


def resnet56() -> keras.Model:
    """The network of cifar10.resnet with 56 layers."""
    return _resnet(56)


def _resnet(depth: int) -> keras.Model:
    decay = keras.regularizers.L2(resnet.WEIGHT_DECAY / 2)

    def convolution(maps, name, channels, stride=1):
        maps = layers.Conv2D(
            channels, 3, stride, "same", use_bias=False, kernel_regularizer=decay, name=name,
            kernel_initializer="he_normal",
        )(maps)  # fmt: skip
        return _normalization(name)(maps)

    inputs = keras.Input(_INPUT)
    maps = layers.ReLU()(convolution(inputs, "conv1", 16))
    for stage, channels in enumerate((16, 32, 64), start=1):
        for block in range(1, (depth - 2) // 6 + 1):
            stride, scope = 2 if stage > 1 and block == 1 else 1, f"stage{stage}.block{block}"
            inner = layers.ReLU()(convolution(maps, f"{scope}.conv1", channels, stride))
            inner = convolution(inner, f"{scope}.conv2", channels)
            if stride > 1:
                new = channels - maps.shape[-1]
                maps = keras.ops.pad(maps[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [new // 2, new - new // 2]])
            maps = layers.ReLU()(layers.Add()([inner, maps]))
    features = layers.GlobalAveragePooling2D()(maps)
    last = layers.Dense(10, kernel_regularizer=decay, name="softmax_linear", kernel_initializer="he_normal")
    return keras.Model(inputs, last(features))


def minigooglenet() -> keras.Model:
    """The network of cifar10.minigooglenet."""
    decay = keras.regularizers.L2(MINIGOOGLENET_DECAY / 2)
    initial = dict(kernel_regularizer=decay, kernel_initializer="lecun_normal")

    def convolution(name, maps, channels, width, stride=1, padding="same"):
        maps = layers.Conv2D(channels, width, stride, padding, use_bias=False, name=name, **initial)(maps)
        return layers.ReLU()(_normalization(name)(maps))

    inputs = keras.Input(_INPUT)
    maps = convolution("conv1", inputs, 96, 3)
    stages = [
        ([(32, 32), (32, 48)], 80),
        ([(112, 48), (96, 64), (80, 80), (48, 96)], 96),
        ([(176, 160), (176, 160)], None),
    ]
    for i, (modules, halving) in enumerate(stages, start=1):
        for j, (ones, threes) in enumerate(modules, start=1):
            scope = f"stage{i}.inception{j}"
            both = [convolution(f"{scope}.one", maps, ones, 1), convolution(f"{scope}.three", maps, threes, 3)]
            maps = layers.Concatenate()(both)
        if halving:
            halved = convolution(f"stage{i}.downsample.three", maps, halving, 3, 2, "valid")
            maps = layers.Concatenate()([halved, layers.MaxPooling2D(3, 2)(maps)])
    features = layers.GlobalAveragePooling2D()(maps)
    return keras.Model(inputs, layers.Dense(10, name="softmax_linear", **initial)(features))


def cifar10_94() -> keras.Model:
    """The network of cifar10.cifar10_94; its layer WHITENING waits for kernels from the images."""
    decay = keras.regularizers.L2(original.WEIGHT_DECAY / 2)
    beta_decay = keras.regularizers.L2(original.WEIGHT_DECAY / original.BIAS_RATE / 2)

    def initial(inputs):
        return keras.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)

    maps = inputs = keras.Input(_INPUT)
    maps = _gelu(Whitening(decay, name=WHITENING)(maps))
    for block, width in enumerate(original.WIDTHS, start=1):
        for number in (1, 2):
            name = f"block{block}.conv{number}"
            maps = layers.Conv2D(
                width, 3, padding="same", use_bias=False, kernel_regularizer=decay, name=name,
                kernel_initializer=initial(9 * maps.shape[-1]),
            )(maps)  # fmt: skip
            maps = layers.MaxPooling2D(2)(maps) if number == 1 else maps
            maps = layers.BatchNormalization(
                momentum=original.MOVING_MOMENTUM, epsilon=1e-5, scale=False, beta_regularizer=beta_decay,
                name=f"{name}.batch_normalization",
            )(maps)  # fmt: skip
            maps = _gelu(maps)
    features = layers.Flatten()(layers.MaxPooling2D(3)(maps))
    kernels = dict(kernel_regularizer=decay, kernel_initializer=initial(features.shape[-1]))
    logits = layers.Dense(10, use_bias=False, name="linear", **kernels)(features)
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


def _gelu(maps):
    """GELU's sigmoid approximation, x * sigmoid(1.702 x)."""
    return layers.Activation(lambda x: x * keras.ops.sigmoid(1.702 * x))(maps)


def _normalization(name: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}.batch_normalization")
