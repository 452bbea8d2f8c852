"""Checks ordinary networks in every mode and prints a line for each; the exit status is 1 if one is refused.

Usage: PYTHONPATH=tests python tests/proof/ordinary.py [--mode=MODE ...] [NAME ...]
"""

import argparse
import functools
import sys

import keras
import numpy as np
import trainings

from tower_train import Examples, Workload, errors, keras_network

L = keras.layers
MODES = {
    "towers": {},
    "mirrored": dict(variable_update="mirrored"),
    "accumulated": dict(num_gpus=1, accumulate_steps=2),
    "both": dict(accumulate_steps=2, variable_update="mirrored"),
}
LEAST = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}  # sizes of images; else 32


def stack(shape, *layers, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Flatten(), L.Dense(3)])


class Positions(L.Layer):
    def build(self, shape):
        self.vectors = self.add_weight(shape[1:])

    def call(self, x):
        return x + self.vectors


def of_tokens(x, causal=False):
    """A transformer's blocks."""
    x = Positions()(L.Dense(16)(x))
    for _ in range(2):
        normal = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal, use_causal_mask=causal)
        x = x + L.Dense(16)(L.Dropout(0.1)(L.Dense(32, "gelu")(L.LayerNormalization()(x))))
    return L.Dense(3)(L.GlobalAveragePooling1D()(x))


def functional(shape, function):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs))


def patches(x):
    return L.Reshape([16, 32])(L.Conv2D(32, 4, 4)(x))


def mixed(x):
    """An MLP-Mixer."""
    y = patches(x)
    for _ in range(2):
        y = y + L.Permute([2, 1])(L.Dense(16, "gelu")(L.Permute([2, 1])(L.LayerNormalization()(y))))
        y = y + L.Dense(32, "gelu")(L.LayerNormalization()(y))
    return L.Dense(3)(L.GlobalAveragePooling1D()(y))


def u_net(x):
    first = L.Conv2D(8, 3, padding="same", activation="relu")(x)
    deep = L.BatchNormalization()(L.Conv2D(16, 3, 2, padding="same", activation="relu")(first))
    return L.Dense(3)(L.Flatten()(L.Conv2D(1, 1)(L.Concatenate()([L.Conv2DTranspose(8, 2, 2)(deep), first]))))


SEQUENCES, IMAGES = [6, 4], [16, 16, 3]
NETWORKS = {
    "perceptron": lambda: stack(SEQUENCES, L.Dense(16, "relu", kernel_regularizer="l2"), L.Dropout(0.5)),
    "LSTM": lambda: stack(SEQUENCES, L.LSTM(8, return_sequences=True, dropout=0.2), L.LSTM(8)),
    "LSTM dropping states": lambda: stack(SEQUENCES, L.LSTM(8, recurrent_dropout=0.2)),
    "GRU": lambda: stack(SEQUENCES, L.GRU(8, return_sequences=True), L.GRU(8, reset_after=False)),
    "unrolled RNN": lambda: stack(SEQUENCES, L.SimpleRNN(8, unroll=True)),
    "bidirectional": lambda: stack(SEQUENCES, L.Bidirectional(L.LSTM(8))),
    "cells": lambda: stack(SEQUENCES, L.RNN(L.StackedRNNCells([L.LSTMCell(8), L.GRUCell(4)]))),
    "ConvLSTM": lambda: stack([3, 8, 8, 2], L.ConvLSTM2D(4, 3), L.BatchNormalization()),
    "WaveNet": lambda: stack(SEQUENCES, *(L.Conv1D(8, 2, padding="causal", dilation_rate=d) for d in (1, 2))),
    "masked words": lambda: stack([6], L.Embedding(10, 8, mask_zero=True), L.LSTM(4), dtype="int64"),
    "bag of words": lambda: stack([6], L.Embedding(10, 8), L.GlobalAveragePooling1D(), dtype="int64"),
    "encoder": lambda: functional(SEQUENCES, lambda x: of_tokens(x)),
    "decoder": lambda: functional(SEQUENCES, lambda x: of_tokens(x, causal=True)),
    "vision transformer": lambda: functional(IMAGES, lambda x: of_tokens(patches(x))),
    "MLP-Mixer": lambda: functional(IMAGES, mixed),
    "U-Net": lambda: functional(IMAGES, u_net),
    "augmented": lambda: stack(IMAGES, L.RandomFlip(), L.RandomRotation(0.1), L.SeparableConv2D(8, 3), L.PReLU()),
    "noisy": lambda: stack(IMAGES, L.RandomZoom(0.1), L.GaussianNoise(0.1), L.DepthwiseConv2D(3)),
    "normalised": lambda: stack(IMAGES, L.GroupNormalization(3), L.SpectralNormalization(L.Conv2D(8, 3))),
    "locally dropped": lambda: stack(IMAGES, L.Conv2D(8, 3), L.UnitNormalization(), L.SpatialDropout2D(0.2)),
}


def application(name):
    """One of keras.applications with three outputs."""
    size = LEAST.get(name, 32)
    make = getattr(keras.applications, name)
    model = make(include_top=False, weights=None, input_shape=(size, size, 3), pooling="avg")
    return keras.Model(model.inputs, L.Dense(3)(model.output))


def examples(inputs):
    rng, labels = np.random.default_rng(0), np.arange(48) % 3
    shape = [48, *inputs.shape[1:]]
    if inputs.dtype == "int64":
        return Examples.from_arrays("words", rng.integers(1, 10, shape), labels)
    values = rng.normal(labels.reshape([48] + [1] * (len(shape) - 1)), 1.0, shape)
    return Examples.from_arrays("numbers", values.astype(np.float32), labels)


def check(name, mode):
    """Prints the line of the check of a network; returns whether it was refused."""
    build = NETWORKS.get(name) or functools.partial(application, name)
    try:
        data = examples(build().inputs[0])
        workload = Workload("ordinary", lambda _: data, keras_network(build))
        outcome = trainings.compared(workload, data, **dict(batch_size=4) | MODES[mode])
    except Exception as error:
        print(f"{name} ({mode}): REFUSED: {errors.reason(error)}", flush=True)
        return True
    print(f"{name} ({mode}): {getattr(outcome, 'line', outcome)}", flush=True)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = f"one of keras.applications, or {', '.join(NETWORKS)}; without names, all of the latter"
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*NETWORKS], help=known)
    parser.add_argument("--mode", action="append", choices=MODES, help="of towers; may be given several times")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NETWORKS and not hasattr(keras.applications, name)]:
        parser.error(f"{unknown[0]} is no network; --help names them")
    return any([check(name, mode) for name in options.names for mode in options.mode or MODES])


if __name__ == "__main__":
    sys.exit(main())
