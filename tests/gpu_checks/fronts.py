"""multi_gpu_model and Estimators on all cards: the numbers of one, in float64."""

import numpy as np

_STEPS, _BATCH, _FEATURES = 5, 24, 6
_PART_MEGABYTES = 4000


def check(findings, settings):
    """On one card its parts, and without any logical CPU devices, carry the towers."""
    if settings.quick:
        findings.unchecked("multi_gpu_model and Estimators on all GPUs", "--quick; tests/fronts has them on CPUs")
        return
    from gpu_checks import trials

    towers, where = trials.places(_PART_MEGABYTES)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[_STEPS * _BATCH, _FEATURES]), rng.normal(size=[_STEPS * _BATCH, 1])
    with findings.attempt(f"Estimator on {where}"):
        many, one = (_train_estimator(f"{settings.scratch}/estimator{n}", n, x, y) for n in (towers, 1))
        _compare(findings, trials, f"Estimator on {where}", many, one)
    with findings.attempt(f"multi_gpu_model on {where}"):
        many, one = (_fit(n, x, y, jit_compile=False) for n in (towers, 0))
        _compare(findings, trials, f"multi_gpu_model on {where}", many, one)
    with findings.attempt("multi_gpu_model with Keras' own choice of jit_compile"):
        values = _fit(towers, x, y, jit_compile="auto")
        finite = all(np.isfinite(value).all() for value in values.values())
        findings.check(finite, "multi_gpu_model with Keras' own choice of jit_compile trains")


def _compare(findings, trials, what, many, one):
    difference = trials.greatest_difference(many, one)
    findings.check(difference <= trials.TOLERANCE, f"{what}: as on one device after {_STEPS} steps",
                   greatest_relative_difference=difference)  # fmt: skip


def _fit(towers, x, y, jit_compile) -> dict:
    """{weight: value} after Keras' fit, in towers or, with 0 of them, by Keras alone."""
    import keras
    import tensorflow as tf

    import tower_train

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        layers = [keras.Input([_FEATURES]), keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        model = keras.Sequential(layers)
    trained = tower_train.multi_gpu_model(model, gpus=towers) if towers else model
    trained.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mean_squared_error", jit_compile=jit_compile)
    trained.fit(x, y, batch_size=_BATCH, shuffle=False, verbose=0)
    return {f"{layer.name}/{weight.name}": weight.numpy() for layer in model.layers for weight in layer.weights}


def _train_estimator(folder, towers, x, y) -> dict:
    """{variable: value} after as many steps; a tower's batch is its share of the global one."""
    import tensorflow as tf

    from tower_train import estimator

    v1 = tf.compat.v1

    def model_fn(features, labels, mode):
        hidden = features["x"]
        for name, units in (("a", 8), ("b", 1)):
            weights = v1.get_variable(f"{name}/weights", [hidden.shape[-1], units], tf.float64,
                                      v1.random_uniform_initializer(-0.5, 0.5, seed=1))  # fmt: skip
            hidden = tf.matmul(tf.tanh(hidden) if name == "b" else hidden, weights)
        loss = tf.reduce_mean((hidden - labels) ** 2)
        update = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, v1.train.get_or_create_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=update)

    def input_fn():
        return tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(_BATCH // towers)

    config = estimator.RunConfig(model_dir=folder, num_gpus=towers, tf_random_seed=1)
    made = estimator.Estimator(model_fn, config=config)
    made.train(input_fn, max_steps=_STEPS)
    return {name: made.get_variable_value(name) for name in made.get_variable_names() if "step" not in name}
