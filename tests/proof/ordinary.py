"""Checks ordinary networks in every mode and prints a line for each; the exit status is 1 if one is refused.

Usage: PYTHONPATH=tests[:FOLDER...] python tests/proof/ordinary.py [--modes=MODE,...] [NAME ...]

A name is a key of NETWORKS (without names: all of them), one of keras.applications, or `MODULE:EXPRESSION@SHAPE` of
published code in a folder: an expression of x and training is a network in TensorFlow 1's manner, another one makes a
Keras model. SHAPE is 32 (images), 6x4 (numbers) or 6i (words). Of batch normalisation no batches in turn are compared.
"""

import functools
import importlib
import re
import sys
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import trainings

from tower_train import Examples, Workload, errors, keras_network
from tower_train.proof import towers

v1, L = tf.compat.v1, keras.layers
MODES = {
    "towers": {},
    "mirrored": dict(variable_update="mirrored"),
    "accumulated": dict(num_gpus=1, accumulate_steps=2),
    "both": dict(accumulate_steps=2, variable_update="mirrored"),
}
LEAST = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}  # sizes of images; else 32
BY_SCAN, FAILED = "recurrent by scan", []


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


def by_scan(x, training):
    a, b = (v1.get_variable(name, [4, 4], x.dtype) for name in "ab")
    return tf.scan(lambda h, row: tf.tanh(row @ a + h @ b), tf.transpose(x, [1, 0, 2]), tf.zeros_like(x[:, 0]))[-1]


SEQUENCES, IMAGES = [6, 4], [16, 16, 3]
NETWORKS = {
    "perceptron": ("6x4", lambda: stack(SEQUENCES, L.Dense(16, "relu", kernel_regularizer="l2"), L.Dropout(0.5))),
    "LSTM": ("6x4", lambda: stack(SEQUENCES, L.LSTM(8, return_sequences=True, dropout=0.2), L.LSTM(8))),
    "LSTM dropping states": ("6x4", lambda: stack(SEQUENCES, L.LSTM(8, recurrent_dropout=0.2))),
    "GRU": ("6x4", lambda: stack(SEQUENCES, L.GRU(8, return_sequences=True), L.GRU(8, reset_after=False))),
    "unrolled RNN": ("6x4", lambda: stack(SEQUENCES, L.SimpleRNN(8, unroll=True))),
    "bidirectional": ("6x4", lambda: stack(SEQUENCES, L.Bidirectional(L.LSTM(8)))),
    "cells": ("6x4", lambda: stack(SEQUENCES, L.RNN(L.StackedRNNCells([L.LSTMCell(8), L.GRUCell(4)])))),
    "ConvLSTM": ("3x8x8x2", lambda: stack([3, 8, 8, 2], L.ConvLSTM2D(4, 3), L.BatchNormalization())),
    BY_SCAN: ("6x4", by_scan),
    "WaveNet": ("6x4", lambda: stack(SEQUENCES, *(L.Conv1D(8, 2, padding="causal", dilation_rate=d) for d in (1, 2)))),
    "masked words": ("6i", lambda: stack([6], L.Embedding(10, 8, mask_zero=True), L.LSTM(4), dtype="int64")),
    "bag of words": ("6i", lambda: stack([6], L.Embedding(10, 8), L.GlobalAveragePooling1D(), dtype="int64")),
    "encoder": ("6x4", lambda: functional(SEQUENCES, lambda x: of_tokens(x))),
    "decoder": ("6x4", lambda: functional(SEQUENCES, lambda x: of_tokens(x, causal=True))),
    "vision transformer": ("16", lambda: functional(IMAGES, lambda x: of_tokens(patches(x)))),
    "MLP-Mixer": ("16", lambda: functional(IMAGES, mixed)),
    "U-Net": ("16", lambda: functional(IMAGES, u_net)),
    "augmented": (
        "16",
        lambda: stack(IMAGES, L.RandomFlip(), L.RandomRotation(0.1), L.SeparableConv2D(8, 3), L.PReLU()),
    ),
    "noisy": ("16", lambda: stack(IMAGES, L.RandomZoom(0.1), L.GaussianNoise(0.1), L.DepthwiseConv2D(3))),
    "normalised": ("16", lambda: stack(IMAGES, L.GroupNormalization(3), L.SpectralNormalization(L.Conv2D(8, 3)))),
    "locally dropped": ("16", lambda: stack(IMAGES, L.Conv2D(8, 3), L.UnitNormalization(), L.SpatialDropout2D(0.2))),
}


def made(name):
    """Returns the inference of a network, and the shape of its features."""
    if name in NETWORKS:
        shape, function = NETWORKS[name]
        return (function if name == BY_SCAN else keras_network(function)), shape
    if ":" not in name:
        size = LEAST.get(name, 32)
        application = functools.partial(getattr(keras.applications, name), include_top=False, weights=None)
        return keras_network(lambda: ended(application(input_shape=(size, size, 3), pooling="avg"))), str(size)
    module, expression, shape = re.fullmatch(r"([\w.]+):(.*)@(\w+)", name).groups()
    names = vars(importlib.import_module(module)) | {"keras": keras, "scoped": scoped}
    if "training" not in expression:
        return keras_network(lambda: ended(eval(expression, names))), shape

    def inference(x, training):
        return tf.reshape(eval(expression, names | {"x": x, "training": training}), [x.shape[0], -1])

    return inference, shape


def scoped(scope, call):
    """Calls a function in a scope of slim."""
    with importlib.import_module("tf_slim").arg_scope(scope):
        return call()


def ended(model):
    """Returns a Keras model with three outputs."""
    return keras.Model(model.inputs, L.Dense(3)(L.Flatten()(keras.tree.flatten(model.output)[0])))


def examples(shape):
    sizes, rng, labels = [int(size) for size in re.findall(r"\d+", shape)], np.random.default_rng(0), np.arange(48) % 3
    if shape.endswith("i"):
        return Examples.from_arrays("words", rng.integers(1, 10, [48, *sizes]), labels)
    sizes = sizes if "x" in shape else [*sizes, *sizes, 3]
    values = rng.normal(size=[48, *sizes]) + labels.reshape([48] + [1] * len(sizes))
    return Examples.from_arrays("numbers", values.astype(np.float32), labels)


def compare(name, modes):
    """Prints the line of the check of a network in each mode."""
    inference, shape = made(name)
    data, trials, build, normalizes = examples(shape), {}, towers.Trial, False
    workload = Workload("ordinary", lambda _: data, inference)

    def trial(workload, examples, config, bar):  # that of one tower is the same in several modes
        if config.batches_per_step > 1:
            return build(workload, examples, config, bar)
        if str(config) not in trials:
            trials[str(config)] = build(workload, examples, config, bar)
        return trials[str(config)]

    for mode in modes:
        if normalizes and MODES[mode].get("accumulate_steps"):
            continue
        began = time.perf_counter()
        try:
            with mock.patch.object(towers, "Trial", trial):
                outcome = trainings.compared(workload, data, **dict(batch_size=4) | MODES[mode])
            line, normalizes = getattr(outcome, "line", outcome), getattr(outcome, "normalizes", False)
        except errors.UserError as error:
            line = f"REFUSED: {error}"
        print(f"{name} ({mode}, {time.perf_counter() - began:.0f} s): {line}", flush=True)
        FAILED.extend([name] * line.startswith("REFUSED"))


def main(words):
    modes = words.pop(0)[8:].split(",") if words and words[0].startswith("--modes=") else MODES
    for name in words or NETWORKS:
        try:
            compare(name, modes)
        except Exception as error:  # of the network itself
            FAILED.append(name)
            print(f"{name}: FAILED {type(error).__name__}: {errors.reason(error)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.exit(bool(FAILED))
