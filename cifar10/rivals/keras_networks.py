"""The deeper networks of this workload as Keras models, layer for layer: float32 images [batch, 32, 32, 3] to logits.

A layer's name is the variable scope of the network that it repeats, with dots for slashes.
"""

import keras
from keras import layers

from cifar10 import resnet
from cifar10.minigooglenet import WEIGHT_DECAY as MINIGOOGLENET_DECAY

_INPUT = (32, 32, 3)


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


def _normalization(name: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}.batch_normalization")
