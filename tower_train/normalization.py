"""Batch normalisation; a part of tower_train.layers.

The statistics of a batch are those of the global batch: mean and variance of all towers that compute at a time, with
exact gradients, so that N towers are one. So are tf.nn.moments and fused_batch_norm, if their batch is a tower's. With
--batch_norm=tower each tower has its own. Moving statistics are updated once per step.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import nn, nn_impl

from tower_train.graph import collectives, context
from tower_train.graph.batch_axis import batch_axis
from tower_train.graph.context import Statistic

v1 = tf.compat.v1
_LEAST_EPSILON = 1.001e-5  # of fused operations, by cuDNN
_OVER = "over_towers"  # scope of operations that one tower does not have: the proof compares those of one name


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
        moving = [
            v1.get_variable(
                name, [channels], dtype, initializer(), v1.no_regularizer, trainable=False, collections=collections
            )
            for name, initializer in (("moving_mean", v1.zeros_initializer), ("moving_variance", v1.ones_initializer))
        ]
        return normalize(inputs, training and not is_frozen, gamma, beta, moving, momentum, epsilon)


def normalize(
    inputs: tf.Tensor,
    training: bool,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moving: Sequence[tf.Variable],
    momentum: float,
    epsilon: float,
) -> tf.Tensor:
    """Applies `batch_normalization` with existing variables (gamma and beta may be tensors), each [channels]. moving:
    the mean and the variance."""
    if is_fused := inputs.shape.rank == 4 and inputs.dtype != tf.float64:
        epsilon = max(epsilon, _LEAST_EPSILON)  # on several towers and in evaluations too
    if not training:
        mean, variance = moving
        return _normalized(inputs, gamma, beta, mean, variance, epsilon)
    tower = context.current()
    tower.normalized.append(inputs.op.name)
    if _towers_together(tower) > 1:
        with v1.name_scope(_OVER):
            outputs, mean, variance = _over_towers(inputs, gamma, beta, epsilon)
    elif is_fused:
        outputs, mean, variance = _fused(inputs, gamma, beta, epsilon)
    else:
        mean, variance = _local_moments(inputs, gamma.dtype)
        outputs = _normalized(inputs, gamma, beta, mean, variance, epsilon)
    for variable, value in zip(moving, (mean, variance), strict=True):
        note(Statistic(variable, value, momentum))
    return outputs


def note(statistic: Statistic) -> None:
    """Passes a statistic of the batch to the training graph, which updates its variable once per step."""
    statistics = context.current().statistics
    if statistics is not None:  # else no step follows
        statistics.append(statistic)


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
    found = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=gamma,
        offset=beta,
        mean=tf.constant([], gamma.dtype),
        variance=tf.constant([], gamma.dtype),
        epsilon=epsilon,
        is_training=True,
    )
    count = tf.cast(tf.size(inputs) // inputs.shape[-1], gamma.dtype)
    # It divides by n - 1 if n > 1.
    return found.y, found.batch_mean, found.batch_variance * (tf.maximum(count - 1, 1) / count)


def _towers_together(tower: context.Context) -> int:
    """Returns how many towers normalise together; 1 outside of the towers of a training."""
    return 1 if tower.by_tower or tower.graph is None else tower.towers


def _over_towers(inputs, gamma, beta, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the outputs, and mean and variance of each channel over the batches of all towers."""
    axes = list(range(inputs.shape.rank - 1))
    gamma, beta = tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)
    if context.current().mean:
        wide = tf.cast(inputs, gamma.dtype)
        mean, variance = moments_over_towers(wide, axes)
        return _normalized(inputs, gamma, beta, mean, variance, epsilon), mean, variance
    mean, variance = _combined(*_local_moments(inputs, gamma.dtype))

    # The gradient in two sums over the batch, of which the towers send each other means once; by TensorFlow's own
    # gradients of mean and variance they would take several passes over the inputs more.
    @tf.custom_gradient
    def normalized(inputs, gamma, beta):
        def gradient(grad):
            inverse = tf.math.rsqrt(variance + epsilon)
            factor = gamma * inverse
            scaled, beta_grad, scale_grad = _scaled_and_summed(grad, inputs, mean, factor)
            gamma_grad = scale_grad * inverse
            count = tf.cast(tf.size(inputs) // inputs.shape[-1], gamma.dtype)
            mean_grad, deviation_grad = tf.unstack(mean_over_towers(tf.stack([beta_grad, gamma_grad])) / count)
            inputs_grad = scaled + _scaled(inputs, mean, -factor * inverse * deviation_grad, -factor * mean_grad)
            return inputs_grad, gamma_grad, beta_grad

        return _scaled(inputs, mean, gamma * tf.math.rsqrt(variance + epsilon), beta), gradient

    return normalized(inputs, gamma, beta), mean, variance


# For batches of images, TensorFlow's fused operations take half of the time or less: one or two passes over them each.
_EPSILON = 2.0**-10  # they divide by sqrt(variance + epsilon): with a variance of 1 - this, by 1


def _by_kernel(inputs: tf.Tensor, kernel: Callable, plain: Callable, *others: tf.Tensor):
    """Returns kernel(inputs, *others) for batches of images on CPUs, else plain(inputs, *others), which equals it.

    Gradients are those of `plain`, since the kernels have none of means and variances.
    """
    if inputs.shape.rank != 4 or inputs.dtype == tf.float64 or "GPU" in inputs.device:  # there not measured
        return plain(inputs, *others)

    @tf.custom_gradient
    def computed(*arguments):
        return kernel(*arguments), lambda *grads: tf.gradients(plain(*arguments), arguments, grads)

    return computed(inputs, *others)


def _local_moments(inputs: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel over a tower's batch."""
    axes = list(range(inputs.shape.rank - 1))

    def kernel(inputs):
        one = tf.ones([inputs.shape[-1]], dtype)
        return _fused(inputs, one, one, _EPSILON)[1:]

    def plain(inputs):
        wide = tf.cast(inputs, dtype)
        mean = tf.reduce_mean(wide, axes)
        return mean, tf.reduce_mean(tf.math.squared_difference(wide, mean), axes)

    return _by_kernel(inputs, kernel, plain)


def _scaled(inputs: tf.Tensor, mean: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Returns (inputs - mean) * scale + offset."""

    def kernel(inputs, mean, scale, offset):
        variance = tf.fill(tf.shape(mean), tf.constant(1 - _EPSILON, mean.dtype))
        return tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=_EPSILON, is_training=False
        ).y

    def plain(inputs, mean, scale, offset):
        return tf.cast((tf.cast(inputs, mean.dtype) - mean) * scale + offset, inputs.dtype)

    return _by_kernel(inputs, kernel, plain, mean, scale, offset)


def _scaled_and_summed(grad, inputs, mean, scale) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns grad * scale, and over the batch the sums of grad and of grad * (inputs - mean)."""
    axes = list(range(inputs.shape.rank - 1))

    def kernel(inputs, grad, mean, scale):
        found = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=grad,
            x=inputs,
            scale=scale,
            reserve_space_1=mean,
            reserve_space_2=tf.fill(tf.shape(mean), tf.constant(1 - _EPSILON, mean.dtype)),
            reserve_space_3=tf.constant([], mean.dtype),
            epsilon=_EPSILON,
            is_training=False,
        )
        return found.x_backprop, found.offset_backprop, found.scale_backprop

    def plain(inputs, grad, mean, scale):
        wide, inputs = tf.cast(grad, mean.dtype), tf.cast(inputs, mean.dtype)
        sums = tf.reduce_sum(wide, axes), tf.reduce_sum(wide * (inputs - mean), axes)
        return tf.cast(wide * scale, grad.dtype), *sums

    return _by_kernel(inputs, kernel, plain, grad, mean, scale)


def moments_over_towers(inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over axes of the batches of all towers as if of one."""
    local_mean = tf.reduce_mean(inputs, axes, keepdims=True)
    combine = context.current().mean
    [mean] = combine([local_mean]) if combine else [local_mean]
    variance = tf.reduce_mean(tf.math.squared_difference(inputs, mean), axes)
    if combine:
        return tf.squeeze(mean, axes), *combine([variance])
    return _combined(tf.squeeze(mean, axes), variance)


def _combined(local_mean: tf.Tensor, local_variance: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over the batches of all towers, which are of equal size, by those of a tower's."""
    outside: list[tf.Tensor] = []  # tensors by which the gradient can be differentiated again

    @tf.custom_gradient
    def combined(local_mean, local_variance):
        def gradient(mean_grad, variance_grad):
            mean_grad, variance_grad = tf.unstack(mean_over_towers(tf.stack([mean_grad, variance_grad])))
            return mean_grad + 2 * (outside[0] - outside[1]) * variance_grad, variance_grad

        both = tf.stack([local_mean, local_variance])
        gathered = collectives.gather_over_towers(both, context.current().towers, _place(both))
        means, variances = tf.unstack(gathered, axis=1)
        mean = tf.reduce_mean(means, 0)
        variance = tf.reduce_mean(variances + tf.math.squared_difference(means, mean), 0)
        return (mean, variance), gradient

    mean, variance = combined(local_mean, local_variance)
    outside += [local_mean, mean]
    return mean, variance


def mean_over_towers(value: tf.Tensor) -> tf.Tensor:
    """Returns the mean over all towers of the value at this place of the network.

    A tower's loss depends on the other towers' values too, but is differentiated by itself. So the gradient from here
    on is the mean over towers of those that arrive here; averaging the towers' gradients of the weights then gives the
    gradient of one big batch.
    """

    @tf.custom_gradient
    def mean(local):
        return collectives.mean_over_towers(local, context.current().towers, _place(local)), mean_over_towers

    return mean(value)


def _place(value: tf.Tensor) -> str:
    """Returns the name of a place in the network, the same in all towers of one turn."""
    name = re.sub(r"tower_\d+/", "", tf.identity(value, name="over_towers").op.name)  # unique, unlike the value's
    return f"{name} in turn {context.current().turn}"


def notes(tower: context.Context) -> list[str]:
    """Returns a line for the log if a network is normalised in a way that makes several towers differ from one."""
    if tower.by_tower and tower.normalized and tower.towers > 1:
        return [
            f"*** batch_norm: each of {tower.towers} towers normalises by its own batch (--batch_norm=tower): they "
            "train otherwise than one"
        ]
    return []


@functools.cache
def replace_functions() -> None:
    """Lets TensorFlow's functions that normalise do so over all towers from now on, if a tower normalises its batch by
    them. Outside of towers, as in another thread, they stay as they are."""
    for name, replacement in (("moments", _moments), ("fused_batch_norm", _fused_batch_norm)):
        plain = getattr(nn_impl, name)
        for module in (nn_impl, nn, v1.nn):  # tf.nn.moments calls that of nn_impl
            setattr(module, name, functools.update_wrapper(functools.partial(replacement, plain), plain))


def _is_of_batch(inputs: tf.Tensor, axes: Sequence[int]) -> bool:
    """Notes that a tensor is normalised over these axes; returns whether that is over the batches of several towers."""
    tower, graph = context.current(), v1.get_default_graph()
    if tower.graph is None:  # no tower; perhaps eager
        return False
    # In a branch, a loop or a function a tower may be alone.
    is_alone = not (graph is inputs.graph is tower.graph) or graph._get_control_flow_context() is not None
    if is_alone or batch_axis(inputs, tower.batch, tower.batch_axes) not in axes:
        return False
    tower.normalized.append(inputs.op.name)
    return _towers_together(tower) > 1


def _moments(plain: Callable, x, axes, shift=None, name=None, keep_dims=None, keepdims=None):
    """Replaces tf.compat.v1.nn.moments."""
    inputs = tf.convert_to_tensor(x)
    static = tf.get_static_value(tf.convert_to_tensor(axes, tf.int32))
    over = [] if static is None or inputs.shape.rank is None else (static.reshape(-1) % inputs.shape.rank).tolist()
    if not _is_of_batch(inputs, over):
        return plain(x, axes, shift=shift, name=name, keep_dims=keep_dims, keepdims=keepdims)
    with v1.name_scope(name, "moments"), v1.name_scope(_OVER):
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
        found = [*moments_over_towers(wide, over)]
        for axis in sorted(over) if keep_dims or keepdims else ():
            found = [tf.expand_dims(each, axis) for each in found]
        return tuple(tf.cast(each, inputs.dtype) for each in found)


def _fused_batch_norm(plain: Callable, *args, **kwargs):
    """Replaces tf.compat.v1.nn.fused_batch_norm."""
    call = inspect.signature(plain).bind(*args, **kwargs)
    call.apply_defaults()
    given = types.SimpleNamespace(**call.arguments)
    inputs = tf.convert_to_tensor(given.x)
    channels = 1 if given.data_format.startswith("NC") else inputs.shape.rank - 1
    over = [axis for axis in range(inputs.shape.rank) if axis != channels]
    if not given.is_training or not _is_of_batch(inputs, over):
        return plain(*args, **kwargs)
    with v1.name_scope(given.name, "fused_batch_norm"), v1.name_scope(_OVER):
        order, epsilon = [*over, channels], max(given.epsilon, _LEAST_EPSILON)
        outputs, *found = _over_towers(tf.transpose(inputs, order), given.scale, given.offset, epsilon)
        tower, count = context.current(), tf.cast(tf.size(inputs) // inputs.shape[channels], found[1].dtype)
        # of all towers, by a mean that is weighted by examples if their batches may differ
        count = tower.towers / tower.mean([1 / count])[0] if tower.mean else tower.towers * count
        found[1] *= count / tf.maximum(count - 1, 1)
        if given.exponential_avg_factor not in (None, 1.0):
            pairs = zip(found, (given.mean, given.variance), strict=True)
            found = [before + given.exponential_avg_factor * (now - before) for now, before in pairs]
        return tf.transpose(outputs, [order.index(axis) for axis in range(len(order))]), *found
