"""Layers that draw random numbers; a part of tower_train.layers."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph import context

v1 = tf.compat.v1


def dropout(
    inputs: tf.Tensor,
    rate: float,
    training: bool,
    noise_shape: Sequence[int | tf.Tensor | None] | None = None,
    rows_per_example: int = 1,
    name: str = "dropout",
) -> tf.Tensor:
    """Sets a share `rate` of the inputs to 0 and divides the others by 1 - rate (Srivastava et al. 2014, section 10).

    The choice is a function of the run's seed, the variable scope and the name, the count of calls with them, and the
    example's position in the stream: N towers, accumulated batches and resumed runs drop the same. A call within a
    tf.while_loop drops the same in all its iterations.

    Args:
      inputs: floating point [batch, ...].
      rate: 0 <= rate < 1.
      training: False returns the inputs.
      noise_shape: of the draws, which are broadcast to the inputs; None is the inputs' size, required in the first
        place. [None, 1, 1, None] drops whole channels of images.
      rows_per_example: above 1, inputs are [batch * rows_per_example, ...], with consecutive rows of each example.
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
    return _draws("dropout").dropout(_layer(name), inputs, rate, noise_shape, rows_per_example)


def random_uniform(
    shape, minval=0.0, maxval=1.0, dtype: tf.DType = tf.float32, rows_per_example: int = 1, name: str = "random_uniform"
) -> tf.Tensor:
    """Draws numbers uniform in [minval, maxval), which belong to examples as those of `dropout` do.

    In evaluation they depend on the example's index, in an exported network on its row, and on no seed.

    Args:
      shape: [batch, ...], such as tf.shape(inputs).
      minval, maxval: numbers, or tensors that are broadcast to the shape.
      dtype: floating point.
      rows_per_example, name: as for `dropout`.

    Raises:
      GraphError: as `dropout`.
    """
    return minval + (maxval - minval) * _draw("random_uniform", name, shape, dtype, rows_per_example)


def random_normal(
    shape, mean=0.0, stddev=1.0, dtype: tf.DType = tf.float32, rows_per_example: int = 1, name: str = "random_normal"
) -> tf.Tensor:
    """Draws normally distributed numbers with this mean and standard deviation; otherwise as `random_uniform`."""
    return mean + stddev * _draw("random_normal", name, shape, dtype, rows_per_example, normal=True)


def _draw(function: str, name: str, *args, **kwargs) -> tf.Tensor:
    numbers = _draws(function).for_layer(_layer(name), *args, **kwargs)
    context.current().batch_axes[numbers.name] = 0  # so that what is made of them is normalised over all towers too
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
