"""A Keras model trained twice from the same weights: by Keras on one device, and in towers."""

import keras
import numpy as np

import tower_train

layers = keras.layers
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
rng = np.random.default_rng(0)


class Adds(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


def data(count, *shape, classes=3):
    return rng.normal(size=[count, *shape]).astype(keras.config.floatx()), rng.integers(0, classes, count)


def small_network():
    return keras.Sequential(
        [
            keras.Input([6, 6, 2]),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.Flatten(),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.01)),
        ]
    )


def twins(build):
    keras.utils.set_random_seed(1)
    one = build()
    keras.utils.set_random_seed(1)
    return one, build()


def fit_both(build, gpus, compile_args, *fit_args, is_eager=True, **fit_kwargs):
    """Trains one twin by Keras' own fit and the other in towers: (model, History), (template, History)."""
    (one, template), fits = twins(build), []
    parallel = tower_train.multi_gpu_model(template, gpus=gpus)
    for trained, owner in ((one, one), (parallel, template)):
        keras.utils.set_random_seed(2)
        trained.compile(**(compile_args() if callable(compile_args) else compile_args))
        one.run_eagerly = is_eager  # in which a few steps take less time than to trace one
        fits.append((owner, trained.fit(*fit_args, **({"verbose": 0, "shuffle": False} | fit_kwargs))))
    return fits


def assert_same(trained, atol):
    (one, one_history), (template, history) = trained
    assert len(one.weights) == len(template.weights) > 0
    for expected, weight in zip(one.weights, template.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), atol=atol, rtol=0, err_msg=weight.path)
    assert history.history.keys() == one_history.history.keys()
    for name, values in one_history.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=10 * atol, rtol=0, err_msg=name)
