"""A small Keras network as a workload, and its training."""

import keras
import numpy as np
import trainings

import tower_train

SIZE, CLASSES = 6, 3
OPTIONS = dict(dtype="float64", learning_rate=0.05, optimizer="momentum", batch_size=8, ema=0.9)


def images():
    rng = np.random.default_rng(0)
    values = rng.normal(size=[24, SIZE, SIZE, 2]).astype(np.float32)
    return tower_train.Examples.from_arrays("images", values, rng.integers(0, CLASSES, 24), ["a", "b", "c"])


def drawing(*layers):
    def make():
        inputs = outputs = keras.Input([SIZE, SIZE, 2])
        for layer in [*layers, keras.layers.Flatten, lambda: keras.layers.Dense(CLASSES)]:
            outputs = layer()(outputs)
        return keras.Model(inputs, outputs)

    return make


def small(constraint=None):
    """Two convolutions, both normalised, the second without scale, and weight decay; layers without names."""
    inputs = keras.Input([SIZE, SIZE, 2])
    maps = keras.layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    maps = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.75)(maps))
    maps = keras.layers.Conv2D(5, 3, use_bias=False, kernel_constraint=constraint)(maps)
    maps = keras.layers.BatchNormalization(momentum=0.5, scale=False)(maps)
    features = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(maps))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(features), name="small")


def workload(make):
    return tower_train.Workload("keras", None, tower_train.keras_network(make))


def train(examples, make, steps, **options):
    return trainings.train(workload(make), examples, steps, **(OPTIONS | options))


def opened(examples, make, **options):
    return trainings.opened(workload(make), examples, **(OPTIONS | options))
