"""Layers that depend on the towers: batch normalisation, dropout and other random numbers.

Also `frozen`, `param_group` and `gradient_until`, for weights that are trained differently or not at all; `on_gpu`, for
layers with another fastest form there.

A tower normalises with statistics of its own examples, or of all towers' with --sync_batch_norm; then N towers are one
here too. The moving statistics for evaluation are updated once per step, with the mean over all towers.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.graph import collectives, context
from tower_train.graph.context import ParamGroup, Statistic
from tower_train.options import renamed
from tower_train.random_layers import dropout, random_normal, random_uniform  # noqa: F401

v1 = tf.compat.v1


def on_gpu() -> bool:
    """Returns whether the current layer is computed on a GPU, where for example another order of axes is fastest."""
    return "GPU" in tf.no_op().device


@contextlib.contextmanager
def frozen():
    """Creates variables that are not trained within this block: no gradient, weight decay, moving average or optimizer
    slots. Batch normalisation uses its moving statistics and leaves them unchanged."""

    _check_variables_are_ours("frozen")

    def custom_getter(getter, *args, **kwargs):  # TensorFlow gives it the getter by that name, or as the first
        return getter(*args, **(kwargs | {"trainable": False, "regularizer": None}))

    with (
        context.entered(dataclasses.replace(context.current(), frozen=True)),
        v1.variable_scope(v1.get_variable_scope(), custom_getter=custom_getter),
    ):
        yield


def _check_variables_are_ours(name: str) -> None:
    if context.current().builds_keras:
        raise errors.GraphError(
            f"layers.{name}: has no effect on the layers of a Keras network. Use freeze_until= of keras_network, or "
            "layer.trainable = False."
        )


@contextlib.contextmanager
def param_group(
    rate_factor: float = 1.0, until_epoch: float = math.inf, muon: bool = True, momentum: float | None = None
):  # fmt: skip
    """Trains variables created in this block at rate_factor times the learning rate, while examples_seen / num_examples
    before the step is below until_epoch; after that their rate is 0.

    In nested blocks the factors multiply and the earliest epoch holds. Weight decay is part of the gradient, so the
    factor applies to it too. --clip_gradients uses gradients before the factor. Moving averages go on.

    With muon=False --optimizer=muon moves them by momentum, as it does variables that are no matrices: for the last
    layer, for embeddings. A momentum replaces --momentum, where the optimizer has one; the innermost block's counts.

    Raises:
      GraphError: rate_factor or until_epoch is not above 0, the factor is not finite, or momentum is not from 0 to
        below 1.
    """
    if not (rate_factor > 0 and until_epoch > 0 and math.isfinite(rate_factor)):
        raise errors.GraphError(
            f"layers.param_group(rate_factor={rate_factor}, until_epoch={until_epoch}): both must be above 0, the "
            "factor finite. Use layers.frozen() for what is not trained at all."
        )
    if momentum is not None and not 0 <= momentum < 1:
        raise errors.GraphError(f"layers.param_group(momentum={momentum}): must be at least 0 and below 1.")
    _check_variables_are_ours("param_group")
    rates = context.current().param_groups

    def creator(create, **kwargs):
        variable = create(**kwargs)
        if variable.trainable:
            outer = rates.get(variable.op.name, ParamGroup())
            rates[variable.op.name] = ParamGroup(
                outer.rate_factor * rate_factor, min(outer.until_epoch, until_epoch), outer.muon and muon,
                outer.momentum if momentum is None else momentum,
            )  # fmt: skip
        return variable

    with tf.variable_creator_scope(creator):
        yield


def learning(*args, **values):
    """The old name of `param_group`."""
    renamed.say_once("layers.learning", "layers.param_group")
    return param_group(*args, **values)


def gradient_until(
    epoch: float, function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], early: tf.Tensor, late: tf.Tensor
) -> tf.Tensor:
    """Returns function(early, late), whose gradient for `early` is 0 and not computed once `epoch` epochs have been
    seen.

    For `early` weights of a block `param_group(until_epoch=epoch)`: their rate is 0 then, but their gradient, back
    through all layers that are still trained, would take as long as before.

    Args:
      epoch: number of epochs after which to stop.
      function: the layers from `early` to the first that is trained to the end, with weights `late`.
      early, late: floating point, of any shape.
    """
    epochs_seen = context.current().epochs_seen
    if epochs_seen is None:  # not in training
        return function(early, late)

    early = tf.convert_to_tensor(early)
    before = tf.stop_gradient(early)  # all but `early` have their gradients as usual
    outputs = function(before, late)

    @tf.custom_gradient
    def apply(early, unchanged):
        def gradient(upstream):
            return tf.cond(
                epochs_seen < epoch,
                lambda: v1.gradients(outputs, before, upstream)[0],
                lambda: tf.zeros_like(before),
            ), upstream

        return tf.identity(unchanged), gradient

    return apply(early, outputs)


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
    # The gradients of scale and shift are sums over the batch, which float16 cannot hold.
    wide = tf.cast(inputs, gamma.dtype) if inputs.dtype == tf.float16 else inputs
    return tf.cast(wide * tf.cast(scale, wide.dtype) + tf.cast(shift, wide.dtype), inputs.dtype)


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
    place = value.op.name.partition("/")[2]  # without the tower's name scope, so the same in every tower

    @tf.custom_gradient
    def mean(local):
        mean_grad = functools.partial(collectives.mean_over_towers, num_towers=num_towers, place=f"gradient of {place}")
        return collectives.mean_over_towers(local, num_towers, place), mean_grad

    return mean(value)


def weights(
    shape: list[int], dtype: tf.DType, initializer=None, weight_decay: float = 0.0, name: str = "weights"
) -> tf.Tensor:
    """Creates trained weights in the current variable scope, or reuses them.

    Args:
      shape, dtype: of the variable.
      initializer: None for Glorot's uniform one, get_variable's default.
      weight_decay: adds weight_decay * sum(weights ** 2) / 2 to the loss, once for all towers; 0 for nothing.
      name: of the variable.
    """
    regularizer = (lambda variable: weight_decay * tf.nn.l2_loss(variable)) if weight_decay else None
    return v1.get_variable(name, shape, dtype, initializer, regularizer=regularizer)


def biases(outputs: tf.Tensor, value: float = 0.0) -> tf.Tensor:
    """Creates or reuses `biases` for outputs [..., channels], one per channel, with an initial value."""
    return v1.get_variable("biases", outputs.shape[-1:], outputs.dtype, v1.constant_initializer(value))


def affine(inputs: tf.Tensor, units: int, initializer=None, weight_decay: float = 0.0, bias: float = 0.0) -> tf.Tensor:
    """Applies a fully connected layer without activation function, with variables `weights` and `biases`.

    Args:
      inputs: floating point [batch, channels].
      units: channels of the outputs.
      initializer, weight_decay: of the weights, as for `weights`.
      bias: initial value of the biases.

    Returns:
      [batch, units].
    """
    products = tf.matmul(inputs, weights([inputs.shape[-1], units], inputs.dtype, initializer, weight_decay))
    return tf.nn.bias_add(products, biases(products, bias))
