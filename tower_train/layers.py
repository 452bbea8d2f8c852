"""Layers that depend on the towers: batch normalisation, dropout and other random numbers.

Also `frozen`, `param_group` and `gradient_until`, for weights that are trained differently or not at all;
`progressive_resize`, for images that are small at first; `on_gpu`, for layers with another fastest form there.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph import context, xla
from tower_train.graph.batch_axis import Axis
from tower_train.graph.context import ParamGroup
from tower_train.normalization import batch_normalization  # noqa: F401

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
            f"layers.{name}: has no effect on the layers of a Keras network. Set layer.trainable = False."
        )


@contextlib.contextmanager
def param_group(
    rate_factor: float = 1.0,
    until_epoch: float = math.inf,
    muon: bool = True,
    momentum: float | None = None,
    from_epoch: float = 0.0,
):
    """Trains variables created in this block at rate_factor times the learning rate, while examples_seen / num_examples
    before the step is at least from_epoch and below until_epoch; else their rate is 0.

    In nested blocks the factors multiply and the epochs of all hold. Weight decay is part of the gradient, so the
    factor applies to it too. --clip_gradients uses gradients before the factor. Moving averages go on.

    With muon=False --optimizer=muon moves them by momentum, as it does variables that are no matrices: for the last
    layer, for embeddings. A momentum replaces --momentum, where the optimizer has one; the innermost block's counts.

    Raises:
      GraphError: rate_factor or until_epoch is not above 0, the factor is not finite, from_epoch is below 0, or
        momentum is not from 0 to below 1.
    """
    if not (rate_factor > 0 and until_epoch > 0 and math.isfinite(rate_factor)):
        raise errors.GraphError(
            f"layers.param_group(rate_factor={rate_factor}, until_epoch={until_epoch}): both must be above 0, the "
            "factor finite. Use layers.frozen() for what is not trained at all."
        )
    if not 0 <= from_epoch < math.inf:
        raise errors.GraphError(f"layers.param_group(from_epoch={from_epoch}): must be at least 0.")
    if momentum is not None and not 0 <= momentum < 1:
        raise errors.GraphError(f"layers.param_group(momentum={momentum}): must be at least 0 and below 1.")
    _check_variables_are_ours("param_group")
    rates = context.current().param_groups

    def creator(create, **kwargs):
        variable = create(**kwargs)
        if variable.trainable:
            outer = rates.get(variable.op.name, ParamGroup())
            rates[variable.op.name] = ParamGroup(
                outer.rate_factor * rate_factor,
                min(outer.until_epoch, until_epoch),
                outer.muon and muon,
                outer.momentum if momentum is None else momentum,
                max(outer.from_epoch, from_epoch),
            )
        return variable

    with tf.variable_creator_scope(creator):
        yield


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

    with tf.device("/cpu:0"), xla.not_compiled():  # a GPU would first send it there
        is_early = epochs_seen < epoch

    @tf.custom_gradient
    def apply(early, unchanged):
        def gradient(upstream):
            return tf.cond(
                is_early,
                lambda: v1.gradients(outputs, before, upstream)[0],
                lambda: tf.zeros_like(before),
            ), upstream

        return tf.identity(unchanged), gradient

    return apply(early, outputs)


def progressive_resize(images: tf.Tensor, sizes: Mapping[float, int]) -> tf.Tensor:
    """Resizes images to the size of the current epoch: training begins on small ones, which take less time.

    A size holds for all towers from the first step at which its number of epochs has been seen. Bilinear, and smoothed
    where it shrinks, as `tf.image.resize(images, size, antialias=True)`. Images stay as they are in evaluation, and in
    networks that no workload trains.

    Args:
      images: floating point [batch, height, width, channels]; all but the batch is static.
      sizes: {epochs seen: height and width from then on, in pixels}; one of them from 0 on.

    Returns:
      [batch, height, width, channels], of a height and width that are not static in training.

    Raises:
      GraphError: sizes has none from 0 on, or one below 1.
    """
    if 0 not in sizes or min(sizes.values()) < 1 or not all(0 <= epoch < math.inf for epoch in sizes):
        raise errors.GraphError(
            f"layers.progressive_resize(sizes={dict(sizes)}): give a size of 1 or more from epoch 0 on, as in "
            "{0: 24, 4.5: 32}."
        )
    epochs_seen = context.current().epochs_seen
    if epochs_seen is None:  # not in training
        return images
    ordered = [sizes[epoch] for epoch in sorted(sizes)]
    ends = np.cumsum(ordered)
    with tf.device("/cpu:0"), xla.not_compiled():
        now = tf.reduce_sum(tf.cast(epochs_seen >= np.array(sorted(sizes), np.float64), tf.int32)) - 1
        begin, end = tf.gather(ends - ordered, now), tf.gather(ends, now)

    def matrix(axis: int) -> tf.Tensor:  # [height or width of now, that of images]
        from_size = images.shape[axis]
        with tf.device("/cpu:0"), xla.not_compiled():  # a part of one table: branches would split XLA's programs
            table = tf.constant(np.concatenate([_resizing(from_size, to) for to in ordered]), images.dtype)
            return tf.ensure_shape(table[begin:end], [None, from_size])

    rows = tf.einsum("nhwc,ih->niwc", images, matrix(1))
    return tf.einsum("niwc,jw->nijc", rows, matrix(2))


def _resizing(from_size: int, to_size: int) -> np.ndarray:
    """Returns [to_size, from_size], the weights of pixels of an axis: triangles about the places of the new ones."""
    scale = from_size / to_size
    places = (np.arange(to_size)[:, np.newaxis] + 0.5) * scale - 0.5
    triangles = np.maximum(0, 1 - np.abs(np.arange(from_size) - places) / max(scale, 1))
    return triangles / triangles.sum(axis=1, keepdims=True)


def weights(
    shape: list[int], dtype: tf.DType, initializer=None, weight_decay: float = 0.0, name: str = "weights"
) -> tf.Tensor:
    """Creates trained weights in the current variable scope, or reuses them; by default with Glorot's uniform values.
    weight_decay adds weight_decay * sum(weights ** 2) / 2 to the loss, once for all towers."""
    regularizer = (lambda variable: weight_decay * tf.nn.l2_loss(variable)) if weight_decay else None
    return v1.get_variable(name, shape, dtype, initializer, regularizer=regularizer)


def biases(outputs: tf.Tensor, value: float = 0.0) -> tf.Tensor:
    """Creates or reuses `biases` for outputs [..., channels], one per channel, with an initial value."""
    return v1.get_variable("biases", outputs.shape[-1:], outputs.dtype, v1.constant_initializer(value))


def affine(inputs: tf.Tensor, units: int, initializer=None, weight_decay: float = 0.0, bias: float = 0.0) -> tf.Tensor:
    """Applies a fully connected layer without activation function, from [batch, channels] to [batch, units], with
    variables `weights`, which get the initializer and the weight decay, and `biases`, which begin at `bias`."""
    products = tf.matmul(inputs, weights([inputs.shape[-1], units], inputs.dtype, initializer, weight_decay))
    return tf.nn.bias_add(products, biases(products, bias))


def dropout(inputs: tf.Tensor, rate: float, training: bool, name: str = "dropout") -> tf.Tensor:
    """Sets a share `rate` of the inputs to 0 and divides the others by 1 - rate (Srivastava et al. 2014, section 10).

    The choice is a function of the run's seed, the variable scope and the name, the count of calls with them, and the
    example's position in the stream: N towers, accumulated batches and resumed runs drop the same. A call within a
    tf.while_loop drops the same in all its iterations.

    Args:
      inputs: floating point [batch, ...].
      rate: 0 <= rate < 1.
      training: False returns the inputs.
      name: distinguishes this layer's numbers from others in the variable scope.

    Returns:
      A tensor of the shape and dtype of inputs.

    Raises:
      GraphError: a rate out of bounds, another number of rows than the tower's examples have, or no tower of a
        workload.
    """
    if not 0 <= rate < 1:
        raise errors.GraphError(f"layers.dropout(rate={rate}): the rate must be at least 0 and below 1.")
    if not training or rate == 0:
        return inputs
    return _draws("dropout").dropout(_layer(name), inputs, rate)


def random_uniform(
    shape, minval=0.0, maxval=1.0, dtype: tf.DType = tf.float32, name: str = "random_uniform"
) -> tf.Tensor:
    """Draws numbers uniform in [minval, maxval), which belong to examples as those of `dropout` do.

    In evaluation they depend on the example's index, in an exported network on its row, and on no seed.

    Args:
      shape: [batch, ...], such as tf.shape(inputs).
      minval, maxval: numbers, or tensors that are broadcast to the shape.
      dtype: floating point.
      name: as for `dropout`.

    Raises:
      GraphError: as `dropout`.
    """
    return minval + (maxval - minval) * _draw("random_uniform", name, shape, dtype)


def random_normal(shape, mean=0.0, stddev=1.0, dtype: tf.DType = tf.float32, name: str = "random_normal") -> tf.Tensor:
    """Draws normally distributed numbers with this mean and standard deviation; otherwise as `random_uniform`."""
    return mean + stddev * _draw("random_normal", name, shape, dtype, normal=True)


def _draw(function: str, name: str, *args, **kwargs) -> tf.Tensor:
    numbers = _draws(function).for_layer(_layer(name), *args, **kwargs)
    # so that what is made of them is normalised over all towers too
    context.current().batch_axes[numbers.name] = Axis()
    return numbers


def _draws(function: str):
    draws = context.current().draws
    if draws is None:
        raise errors.GraphError(
            f"layers.{function} draws by an example's position in the stream of a workload, and there is none here. "
            "Call it in a workload's inference or loss; in a model_fn use TensorFlow's own."
        )
    return draws


def _layer(name: str) -> str:
    scope = v1.get_variable_scope().name
    return f"{scope}/{name}" if scope else name
