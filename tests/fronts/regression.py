"""Linear regression in float64 as a model_fn, and its training in numpy."""

import numpy as np
import tensorflow as tf

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
TRAIN, EVAL, PREDICT = tf_estimator.ModeKeys.TRAIN, tf_estimator.ModeKeys.EVAL, tf_estimator.ModeKeys.PREDICT
rng = np.random.default_rng(0)
X = rng.normal(size=[48, 3])
Y = X @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=48)
BATCH, RATE, MOMENTUM = 4, 2**-5, 0.875  # rates that float32, in which optimizers keep them, holds exactly


def input_fn(batch=BATCH, epochs=1, count=48):
    return tf.data.Dataset.from_tensor_slices(({"x": X[:count]}, Y[:count])).repeat(epochs).batch(batch)


def model_fn(features, labels, mode, params):
    """Linear regression in float64, of one get_variable and one tf.Variable, for one device."""
    weights = v1.get_variable("weights", [3], tf.float64, v1.zeros_initializer())
    bias = tf.Variable(np.float64(0), name="bias")
    y = tf.add(tf.linalg.matvec(features["x"], weights), bias, name="prediction")
    if mode == PREDICT:
        return tf_estimator.EstimatorSpec(mode, {"y": y, "twice": 2 * y})
    loss = tf.reduce_mean(tf.square(y - labels), name="squared_error")
    if mode == EVAL:
        metrics = {"mae": v1.metrics.mean_absolute_error(labels, y)}
        return tf_estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = v1.train.MomentumOptimizer(params.get("rate", RATE), MOMENTUM)
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Runs(tf_estimator.SessionRunHook):
    """Runs an op in each step, as TF-GAN's hooks do with the updates of a network: that takes a batch too."""

    def __init__(self, op=None):
        self.op = op

    def before_run(self, run_context):
        run_context.session.run(self.op)


def make(model_dir, towers=1, fn=model_fn, params=None, warm_start_from=None, **config):
    config = tf_estimator.RunConfig(**({"num_gpus": towers, "tf_random_seed": 1} | config))
    return tf_estimator.Estimator(fn, model_dir, config, params, warm_start_from)


def expected_weights(steps, towers=1, rate=RATE, first_row=None, start=(0, 0, 0, 0)):
    """The weights and the bias after some steps, in numpy: the batches of all towers are one batch.

    first_row: step -> the first row of this batch in X, repeated; None for consecutive batches.
    start: the first values.
    """
    inputs, values, velocity = np.c_[X, np.ones(48)], np.array(start), np.zeros(4)
    for step in range(steps):
        begin = first_row(step) if first_row else step * BATCH * towers
        rows = np.arange(begin, begin + BATCH * towers) % 48
        grad = 2 * inputs[rows].T @ (inputs[rows] @ values - Y[rows]) / len(rows)
        velocity = MOMENTUM * velocity + grad
        values = values - rate * velocity
    return values


def weights_of(estimator):
    return np.append(estimator.get_variable_value("weights"), estimator.get_variable_value("bias"))
