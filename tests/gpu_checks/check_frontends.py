"""multi_gpu_model and Estimators on all cards, on parts of the only one, or on the CPU: the numbers of one device."""

import keras
import numpy as np
import tensorflow as tf

import tower_train
from gpu_checks import trials
from tower_train import estimator

TOWERS = trials.places(parts_megabytes=4000)
STEPS, BATCH, FEATURES = 5, 24, 6
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[STEPS * BATCH, FEATURES]), RNG.normal(size=[STEPS * BATCH, 1])


def test_an_estimator(tmp_path):
    trials.assert_same(train_estimator(tmp_path / "many", TOWERS), train_estimator(tmp_path / "one", 1))


def test_multi_gpu_model():
    trials.assert_same(fit(TOWERS, jit_compile=False), fit(0, jit_compile=False))


def test_multi_gpu_model_with_keras_own_choice_of_jit_compile():
    assert all(np.isfinite(value).all() for value in fit(TOWERS, jit_compile="auto").values())


def make() -> keras.Model:
    keras.backend.clear_session()  # names are numbered
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        layers = [keras.Input([FEATURES]), keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        return keras.Sequential(layers)


def fit(towers, jit_compile) -> dict:
    """Returns {weight: value} after Keras' fit, in towers or, with 0 of them, by Keras alone."""
    model = make()
    trained = tower_train.multi_gpu_model(model, gpus=towers, check_towers="never") if towers else model
    trained.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mean_squared_error", jit_compile=jit_compile)
    trained.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return {f"{layer.name}/{weight.name}": weight.numpy() for layer in model.layers for weight in layer.weights}


def train_estimator(folder, towers) -> dict:
    """Returns {variable: value} after as many steps; a tower's batch is its share of the global one."""

    def model_fn(features, labels, mode):
        outputs = tf.keras.layers.Dense(1, name="b")(tf.keras.layers.Dense(8, "tanh", name="a")(features))
        loss = tf.reduce_mean(tf.square(outputs - labels))
        optimizer = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    keras.config.set_floatx("float64")
    config = estimator.RunConfig(num_gpus=towers, tf_random_seed=1, check_towers="never")
    made = estimator.Estimator(model_fn, folder, config)
    made.train(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH // towers), max_steps=STEPS)
    return {name: made.get_variable_value(name) for name in made.get_variable_names() if "step" not in name}
