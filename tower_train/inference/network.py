"""A trained network: one tower without a loss, on variables that a checkpoint restores."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples, Tensors
from tower_train.graph import context, towers, update, xla
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.variables import Variables
from tower_train.workload import Workload

v1 = tf.compat.v1


def trained_outputs(
    workload: Workload,
    features: Tensors,
    dtype: str,
    variables: Variables,
    tower: Tower,
    draws: Draws,
    is_compiled: bool = False,
) -> tuple[Tensors, Tensors]:
    """Builds a tower on prepared features; returns its outputs, or their mean over the workload's views, and those of
    the first view. Raises GraphError if the network breaks a rule of the towers, or the views cannot be averaged."""

    def network(features: Tensors) -> Tensors:
        return towers.tower_outputs(workload, features, tf.as_dtype(dtype), training=False)

    with (
        variables.tower(tower, _restored),
        xla.compiled(is_compiled, tower.device),
        context.entered(context.Context(draws=draws)),
    ):
        if workload.test_time_augmentation:
            return _over_views(workload, network, features)
        outputs = network(features)
        return outputs, outputs


def _restored(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
    """Gets variables whose values come from a checkpoint, without training examples and Python; a custom getter."""
    if shape is not None:  # else the initializer is a tensor, which has it
        initializer = v1.zeros_initializer()
    return getter(name, shape, dtype, initializer, *args, **kwargs)


def _over_views(workload: Workload, network: Callable[[Tensors], Tensors], features: Tensors) -> tuple:
    """Returns the weighted mean of the network's outputs over views, and the outputs of the first view, which are also
    the results of examples that are not unsure, if the workload tells these."""
    weights, views = zip(*workload.test_time_augmentation(features), strict=True)
    if abs(sum(weights) - 1) > 1e-6:
        raise errors.GraphError(
            f"workload {workload.name}: the weights of its views are {', '.join(f'{weight:g}' for weight in weights)}, "
            f"which sum to {sum(weights):g}. They must sum to 1."
        )

    with v1.name_scope("views"):
        first = network(views[0])
        if not workload.unsure:
            return _mean(network, first, views[1:], weights), first
        unsure = workload.unsure(first)
        # One at least, as not all operations take a batch of none.
        rows = tf.where(tf.concat([tf.ones_like(unsure[:1]), unsure[1:]], axis=0))[:, 0]
        chosen, *views = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), [first, *views[1:]])

        def placed(leaf: tf.Tensor, means: tf.Tensor) -> tf.Tensor:
            is_unsure = tf.reshape(unsure, [-1] + [1] * (leaf.shape.rank - 1))
            return tf.where(is_unsure, tf.tensor_scatter_nd_update(leaf, rows[:, tf.newaxis], means), leaf)

        return tf.nest.map_structure(placed, first, _mean(network, chosen, views, weights)), first


def _mean(network: Callable[[Tensors], Tensors], first: Tensors, views: Sequence[Tensors], weights) -> Tensors:
    """Returns the weighted mean of the first view's outputs and those of further views."""
    outputs = [first]
    for view in views:
        # In sequence: together they take twice the time on a CPU, and the memory of all their activations.
        with tf.control_dependencies([tensor.op for tensor in tf.nest.flatten(outputs[-1])]):
            view = tf.nest.map_structure(tf.identity, view)
        with v1.variable_scope(v1.get_variable_scope(), reuse=True):
            outputs.append(network(view))

    def mean(*outputs: tf.Tensor) -> tf.Tensor:
        # One sum, since TensorFlow rearranges chains of products and sums differently in different graphs.
        factors = tf.reshape(tf.constant(weights, outputs[0].dtype), [-1] + [1] * outputs[0].shape.rank)
        return tf.reduce_sum(tf.stack(outputs) * factors, axis=0)

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
