"""A trained network: one tower without a loss, on variables that a checkpoint restores."""

from collections.abc import Callable

import tensorflow as tf

from tower_train import errors, user_functions
from tower_train.examples import Examples, Tensors
from tower_train.graph import context, towers, update
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.variables import Variables
from tower_train.workload import Workload

v1 = tf.compat.v1


def trained_outputs(
    workload: Workload, features: Tensors, dtype: str, variables: Variables, tower: Tower, draws: Draws
) -> Tensors:
    """Builds a tower and returns its outputs, or the mean over the workload's views.

    Args:
      workload, features: inference, and what its `prepare` returned, [batch, ...].
      dtype: of the arithmetic.
      variables: the same for all towers.
      tower: its place.
      draws: the random numbers of its layers.

    Raises:
      GraphError: the network breaks a rule of the towers, or the views cannot be averaged.
    """

    def network(features: Tensors) -> Tensors:
        return towers.tower_outputs(workload, features, tf.as_dtype(dtype), training=False)

    with variables.tower(tower, _restored), context.entered(context.Context(draws=draws)):
        views = workload.test_time_augmentation
        return _mean_over_views(workload, network, features) if views else network(features)


def _restored(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
    """Gets variables whose values come from a checkpoint, without training examples and Python; a custom getter."""
    if shape is not None:  # else the initializer is a tensor, which has it
        initializer = v1.zeros_initializer()
    return getter(name, shape, dtype, initializer, *args, **kwargs)


def _mean_over_views(workload: Workload, network: Callable[[Tensors], Tensors], features: Tensors) -> Tensors:
    """Returns the weighted mean of the network's outputs over views. Raises GraphError if the weights do not sum to 1,
    or the outputs are not floating point."""
    weights, views = zip(*user_functions.call(workload, "test_time_augmentation", features), strict=True)
    if abs(sum(weights) - 1) > 1e-6:
        raise errors.GraphError(
            f"workload {workload.name}: the weights of its views are {', '.join(f'{weight:g}' for weight in weights)}, "
            f"which sum to {sum(weights):g}. They must sum to 1."
        )

    def mean(*outputs: tf.Tensor) -> tf.Tensor:
        if not outputs[0].dtype.is_floating:
            raise errors.GraphError(
                f"workload {workload.name}: outputs of dtype {outputs[0].dtype.name} have no mean over views. Let "
                "inference return floating-point outputs, or leave `test_time_augmentation` out."
            )
        # One sum, since TensorFlow rearranges chains of products and sums differently in different graphs.
        factors = tf.reshape(tf.constant(weights, outputs[0].dtype), [-1] + [1] * outputs[0].shape.rank)
        return tf.reduce_sum(tf.stack(outputs) * factors, axis=0)

    outputs = []
    with v1.name_scope("views"):
        for view in views:
            # In sequence: together they take twice the time on a CPU, and the memory of all their activations.
            with tf.control_dependencies([tensor.op for tensor in tf.nest.flatten(outputs[-1:])]):
                view = tf.nest.map_structure(tf.identity, view)
            with v1.variable_scope(v1.get_variable_scope(), reuse=bool(outputs)):
                outputs.append(network(view))
        return tf.nest.map_structure(mean, *outputs)


def are_of_classes(outputs: Tensors, examples: Examples) -> bool:
    """Returns whether outputs are [batch, classes], one for each of the examples' classes."""
    return bool(examples.class_names) and tf.is_tensor(outputs) and outputs.shape[1:] == [len(examples.class_names)]


def variables_to_restore(decay: float) -> dict[str, tf.Variable]:
    """Returns {name in a checkpoint: variable of the default graph} for using a trained network: trained weights and
    moving statistics begin as their moving averages of this decay, or for decay 0 as they are."""
    if decay:
        return tf.train.ExponentialMovingAverage(decay, name=update.AVERAGE).variables_to_restore()
    return {v.op.name: v for v in v1.global_variables()}
