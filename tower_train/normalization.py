"""Batch normalisation; a part of tower_train.layers.

A tower normalises with statistics of its own examples, or of all towers' with --sync_batch_norm; then N towers are one
here too. The moving statistics for evaluation are updated once per step, with the mean over all towers.
"""

import functools
import re
from collections.abc import Callable

import tensorflow as tf

from tower_train.graph import collectives, context
from tower_train.graph.context import Statistic

v1 = tf.compat.v1


def batch_normalization(
    inputs: tf.Tensor,
    training: bool,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    name: str = "batch_normalization",
    scale: bool | float = True,
    regularizer: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Normalises each channel (Ioffe and Szegedy 2015, algorithms 1 and 2).

        gamma * (inputs - mean) / sqrt(variance + epsilon) + beta

    Creates the variables gamma (ones), beta (zeros), moving_mean (zeros) and moving_variance (ones) under `name`; they
    and the statistics are never below float32. Variances are of the batch itself (divided by n).

    Args:
      inputs: floating point [batch, ..., channels].
      training: normalise with the batch's mean and variance and note them, or with the moving ones, as `frozen` does.
      momentum: of the moving mean and variance.
      epsilon: added to the variance.
      name: variable scope.
      scale: True for gamma; False for no gamma, which is 1 then; or a number by which all outputs are multiplied
        instead.
      regularizer: of gamma and beta; None for the variable scope's.

    Returns:
      A tensor of the shape and dtype of inputs.
    """
    channels = inputs.shape[-1]
    dtype = tf.float32 if inputs.dtype.size < 4 else inputs.dtype
    with v1.variable_scope(name):
        if scale is True:
            gamma = v1.get_variable("gamma", [channels], dtype, v1.ones_initializer(), regularizer)
        else:
            gamma = tf.fill([channels], tf.constant(1 if scale is False else scale, dtype))
        beta = v1.get_variable("beta", [channels], dtype, v1.zeros_initializer(), regularizer)
        if not isinstance(scale, bool):
            beta = scale * beta
        is_frozen = context.current().frozen
        collections = moving_collections(is_averaged=not is_frozen)
        moving_mean, moving_variance = (
            v1.get_variable(
                name, [channels], dtype, initializer(), v1.no_regularizer, trainable=False, collections=collections
            )
            for name, initializer in (("moving_mean", v1.zeros_initializer), ("moving_variance", v1.ones_initializer))
        )
        training = training and not is_frozen
        return normalize(inputs, training, gamma, beta, moving_mean, moving_variance, momentum, epsilon)


def normalize(
    inputs: tf.Tensor,
    training: bool,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moving_mean: tf.Variable,
    moving_variance: tf.Variable,
    momentum: float,
    epsilon: float,
) -> tf.Tensor:
    """Applies `batch_normalization` with existing variables (gamma and beta may be tensors), each [channels]."""
    if not training:
        return _normalized(inputs, gamma, beta, moving_mean, moving_variance, epsilon)
    towers = context.current().synchronized_towers
    if not towers and inputs.shape.rank == 4 and inputs.dtype != tf.float64:
        outputs, mean, variance = _fused(inputs, gamma, beta, epsilon)
    else:
        mean, variance = _moments(tf.cast(inputs, gamma.dtype), max(1, towers))
        outputs = _normalized(inputs, gamma, beta, mean, variance, epsilon)
    for moving, value in ((moving_mean, mean), (moving_variance, variance)):
        note(Statistic(moving, value, momentum))
    return outputs


def note(statistic: Statistic) -> None:
    """Passes a statistic of the batch to the training graph, which updates its variable once per step."""
    noted = context.current().statistics
    if noted is not None:  # else no step follows
        noted.append(statistic)


def moving_collections(is_averaged: bool) -> list[str]:
    """Returns the collections of moving statistics."""
    # Moving averages of the weights include them: averaged weights need statistics that lag behind as they do.
    return [v1.GraphKeys.GLOBAL_VARIABLES, *([v1.GraphKeys.MOVING_AVERAGE_VARIABLES] if is_averaged else [])]


def _normalized(inputs, gamma, beta, mean, variance, epsilon: float) -> tf.Tensor:
    """Normalises by one multiplication and one addition per element."""
    scale = gamma * tf.math.rsqrt(variance + epsilon)
    shift = beta - mean * scale
    # Never below float32: the gradients of scale and shift are sums over the batch, which float16 cannot hold, and in
    # bfloat16 evaluation would round otherwise than the fused operation of the training.
    return tf.cast(tf.cast(inputs, gamma.dtype) * scale + shift, inputs.dtype)


def _fused(inputs, gamma, beta, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the outputs and the batch's mean and variance by one fused operation, which is faster."""
    outputs, mean, variance = v1.nn.fused_batch_norm(inputs, gamma, beta, epsilon=epsilon, is_training=True)
    count = tf.cast(tf.size(inputs) // inputs.shape[-1], variance.dtype)
    # It divides by n - 1 if n > 1.
    return outputs, mean, variance * (tf.maximum(count - 1, 1) / count)


def _moments(inputs: tf.Tensor, num_towers: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel over the batches of all towers, which are of equal size."""
    axes = list(range(inputs.shape.rank - 1))
    mean = mean_over_towers(tf.reduce_mean(inputs, axes), num_towers)
    variance = mean_over_towers(tf.reduce_mean(tf.square(inputs - mean), axes), num_towers)
    return mean, variance


def mean_over_towers(value: tf.Tensor, num_towers: int) -> tf.Tensor:
    """Returns the mean over all towers of the value at this place of the network.

    A tower's loss depends on the other towers' values too, but is differentiated by itself. So the gradient from here
    on is the mean over towers of those that arrive here; averaging the towers' gradients of the weights then gives the
    gradient of one big batch.
    """
    if num_towers == 1:
        return value
    # Without the tower's name, so the same in every tower; tf.recompute_grad has it twice.
    place = re.sub(r"tower_\d+/", "", value.op.name)

    @tf.custom_gradient
    def mean(local):
        mean_grad = functools.partial(collectives.mean_over_towers, num_towers=num_towers, place=f"gradient of {place}")
        return collectives.mean_over_towers(local, num_towers, place), mean_grad

    return mean(value)
