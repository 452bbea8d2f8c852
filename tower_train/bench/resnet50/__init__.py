"""ResNet-50 of keras.applications on made-up images of 224 pixels, for the benchmark: a network of GPUs' size."""

import keras
import numpy as np

from tower_train import Examples, Workload, keras_network

SIZE, CLASSES, COUNT = 224, 1000, 1024
RECIPE = {"optimizer": "momentum", "learning_rate": 0.01, "ema": 0.0}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Returns images, uint8 [n, height, width, 3], and labels, int32 [n]."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [COUNT, SIZE, SIZE, 3], np.uint8)
    return images, rng.integers(0, CLASSES, COUNT).astype(np.int32)


def examples(request) -> Examples:
    return Examples.from_arrays(f"made-up images of {SIZE} pixels, {request.split}", *arrays())


def build() -> keras.Model:
    """Builds the network: images to logits, which Keras computes in the variables' dtype."""
    inputs = keras.Input([SIZE, SIZE, 3], dtype="uint8")
    scaled = keras.layers.Rescaling(1 / 127.5, -1.0)(inputs)
    base = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_tensor=scaled)
    logits = keras.layers.Dense(CLASSES, dtype=keras.config.dtype_policy().variable_dtype)(base.output)
    return keras.Model(inputs, logits)


WORKLOAD = Workload(name="resnet50", examples=examples, inference=keras_network(build), recipe=RECIPE)
