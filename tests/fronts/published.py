"""Runs a published program of keras.io as it is, by Keras and in two towers, and prints by how much its weights differ.

    python tests/fronts/published.py FILE...

In float64, on the first 150 examples of Fashion-MNIST as MNIST, at most two epochs a `fit`. The files are those of
keras-team/keras-core, examples/keras_io; `keras_core` is keras here.
"""

import pathlib
import sys

import keras
import numpy as np

import tower_train

EXAMPLES, EPOCHS = 150, 2


def runs(path, gpus):
    """Returns the weights after each `fit` of a program, all of whose models train in so many towers."""
    keras.utils.set_random_seed(1)
    weights, fit, load = [], keras.Model.fit, keras.datasets.fashion_mnist.load_data

    def fitted(model, *args, epochs=1, **kwargs):
        keras.Model.fit = fit
        keras.utils.set_random_seed(2)
        parallel = tower_train.multi_gpu_model(model, gpus=gpus) if gpus > 1 else model
        history = parallel.fit(*args, **kwargs | {"epochs": min(epochs, EPOCHS), "verbose": 0})
        weights.append(model.get_weights())
        keras.Model.fit = fitted
        return history

    keras.Model.fit = fitted
    keras.datasets.mnist.load_data = lambda: tuple((x[:EXAMPLES], y[:EXAMPLES]) for x, y in load())
    try:
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    finally:
        keras.Model.fit = fit
    return weights


def main(*paths):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"}
    sys.modules.update({f"keras_core{name[5:]}": module for name, module in modules.items()})
    for path in map(pathlib.Path, paths):
        pairs = [pair for fits in zip(runs(path, 1), runs(path, 2), strict=True) for pair in zip(*fits, strict=True)]
        print(f"{path.name}: {max(np.abs(one - towers).max() for one, towers in pairs):.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
