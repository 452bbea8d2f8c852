"""The one update of the variables, on the CPU: optimizer, then moving averages, then counters."""

import tensorflow as tf

from tower_train.graph.gradients import GradientsAndVariables

v1 = tf.compat.v1


def make_optimizer(name: str, learning_rate: tf.Tensor, momentum: float) -> v1.train.Optimizer:
    """TensorFlow's optimizer by its name on the command line: sgd, momentum or adam."""
    return {
        "sgd": lambda: v1.train.GradientDescentOptimizer(learning_rate),
        "momentum": lambda: v1.train.MomentumOptimizer(learning_rate, momentum),
        "adam": lambda: v1.train.AdamOptimizer(learning_rate),
    }[name]()


def moving_averages(decay: float, global_step: tf.Variable | None = None) -> tf.train.ExponentialMovingAverage | None:
    """The moving averages of the weights; None for decay 0.

    With global_step the decay starts low, min(decay, (1 + step) / (10 + step)), as in the original.
    """
    return tf.train.ExponentialMovingAverage(decay, global_step) if decay else None


def apply_update(
    gradients: GradientsAndVariables,
    optimizer: v1.train.Optimizer,
    averages: tf.train.ExponentialMovingAverage | None,
    counts: list[tuple[tf.Variable, int]],
) -> tf.Operation:
    """One step, in this order: the variables, the moving averages of all trainable ones, the counters.

    Args:
      gradients: what to apply.
      optimizer: what applies it.
      averages: from `moving_averages`, or None.
      counts: counters and what a step adds to each.
    """
    updated = optimizer.apply_gradients(gradients)
    with tf.control_dependencies([updated]):
        averaged = averages.apply(v1.trainable_variables()) if averages else tf.no_op()
    with tf.control_dependencies([averaged]):
        return tf.group(*[counter.assign_add(amount) for counter, amount in counts])
