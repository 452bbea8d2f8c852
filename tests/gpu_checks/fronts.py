"""multi_gpu_model and Estimators on all cards: the numbers of one, in float64."""

import keras
import numpy as np
import tensorflow as tf

import tower_train
from gpu_checks import trials
from gpu_checks.findings import attempt, check
from tower_train import estimator

_STEPS, _BATCH, _FEATURES = 5, 24, 6
_PART_MEGABYTES = 4000
_RNG = np.random.default_rng(0)
_X, _Y = _RNG.normal(size=[_STEPS * _BATCH, _FEATURES]), _RNG.normal(size=[_STEPS * _BATCH, 1])


def trained(settings):
    """On one card its parts, and without any logical CPU devices, carry the towers."""
    towers, where = trials.places(_PART_MEGABYTES)
    fronts = {
        "Estimator": lambda count: _train_estimator(f"{settings.scratch}/estimator{count}", count or 1),
        "multi_gpu_model": lambda count: _fit(count, jit_compile=False),
    }
    for name, train in fronts.items():
        what = f"{name} on {where}: as on one device after {_STEPS} steps"
        with attempt(what):
            trials.compare(what, train(towers), train(0))
    with attempt("multi_gpu_model with Keras' own choice of jit_compile"):
        finite = all(np.isfinite(value).all() for value in _fit(towers, jit_compile="auto").values())
        check(finite, "multi_gpu_model with Keras' own choice of jit_compile trains")


def _model() -> keras.Model:
    keras.backend.clear_session()  # names are numbered
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        layers = [keras.Input([_FEATURES]), keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        return keras.Sequential(layers)


def _fit(towers, jit_compile) -> dict:
    """Returns {weight: value} after Keras' fit, in towers or, with 0 of them, by Keras alone."""
    model = _model()
    trained = tower_train.multi_gpu_model(model, gpus=towers) if towers else model
    trained.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mean_squared_error", jit_compile=jit_compile)
    trained.fit(_X, _Y, batch_size=_BATCH, shuffle=False, verbose=0)
    return {f"{layer.name}/{weight.name}": weight.numpy() for layer in model.layers for weight in layer.weights}


def _train_estimator(folder, towers) -> dict:
    """Returns {variable: value} after as many steps; a tower's batch is its share of the global one."""
    model = _model()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mean_squared_error")
    config = estimator.RunConfig(num_gpus=towers, tf_random_seed=1)
    made = estimator.model_to_estimator(model, model_dir=folder, config=config)
    made.train(lambda: tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH // towers), max_steps=_STEPS)
    return {name: made.get_variable_value(name) for name in made.get_variable_names() if "step" not in name}
