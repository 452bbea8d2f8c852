"""The smallest programs with the mechanisms of keras.io's examples: {name: Example}.

Those with a training step of their own are in keras_step_examples.py. Batch normalisation, which sees a tower's part of
a batch, is layer normalisation here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops
EXAMPLES: dict[str, "Example"] = {}


@dataclasses.dataclass(frozen=True)
class Example:
    build: Callable[[], keras.Model]
    compiled: Callable[[], dict]  # the arguments of its `compile`
    data: Callable[[], dict[str, Any]]  # those of its `fit`
    on_workers: bool = False  # whether two workers train it in a test


def example(compiled, data, on_workers=False):
    """Registers a program by the name of the function that builds its model."""

    def register(build):
        EXAMPLES[build.__name__] = Example(build, compiled, data, on_workers)
        return build

    return register


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def classes(count, kinds, seed=0):
    return np.random.default_rng(seed).integers(0, kinds, count)


def dense(*units, name=None):
    return keras.Sequential([keras.Input([units[0]]), *(layers.Dense(n, "tanh") for n in units[1:])], name=name)


class Distiller(keras.Model):
    """vision/knowledge_distillation.py: a `compute_loss` of its own, which needs the inputs."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense(6, 8, 3), dense(6, 4, 3)
        self.teacher.trainable = False

    def compile(self, distillation_loss_fn, alpha, temperature, **kwargs):
        super().compile(**kwargs)
        self.distillation_loss_fn, self.alpha, self.temperature = distillation_loss_fn, alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = super().compute_loss(x, y, y_pred, sample_weight)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@example(
    lambda: {
        "optimizer": "adam",
        "metrics": [keras.metrics.SparseCategoricalAccuracy()],
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": keras.losses.KLDivergence(),
        "alpha": 0.1,
        "temperature": 10,
    },
    lambda: {"x": numbers(11, 6), "y": classes(11, 3)},
)
def knowledge_distillation():
    """vision/knowledge_distillation.py."""
    return Distiller()


@example(
    lambda: {"optimizer": "rmsprop", "loss": "binary_crossentropy", "metrics": ["accuracy"]},
    lambda: {
        "x": {
            "age": numbers(11, 1),
            "kind": classes([11, 1], 4),
            "word": tf.constant(np.array([b"a", b"b", b"c"], object)[classes([11, 1], 3)]),
        },
        "y": classes(11, 2),
        "sample_weight": np.linspace(0.5, 2, 11),
    },
    on_workers=True,
)
def preprocessing_layers():
    """structured_data/structured_data_classification_from_scratch.py: lookups and crossed features in the model."""
    age, kind = keras.Input([1], name="age"), keras.Input([1], name="kind", dtype="int64")
    word = keras.Input([1], name="word", dtype="string")
    encoded = [
        layers.Normalization(mean=1.0, variance=2.0)(age),
        layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")(age),
        layers.CategoryEncoding(4, output_mode="one_hot")(kind),
        layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(word),
        layers.HashedCrossing(6, output_mode="one_hot")((kind, word)),
    ]
    hidden = layers.Dropout(0.5)(layers.Dense(6, "relu")(layers.concatenate(encoded)))
    return keras.Model({"age": age, "kind": kind, "word": word}, layers.Dense(1, "sigmoid")(hidden))
