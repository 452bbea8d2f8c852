"""Gradients: their mean over towers, those of regularizers, clipping, and the check that they are finite."""

import collections
import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from tower_train import errors
from tower_train.console import enumeration, notice_once

v1 = tf.compat.v1
_MOST_NAMES = 3  # in a message
_MUCH = 2**14  # numbers of a gradient, from which on its check takes longer than its launch

Gradient = tf.Tensor | tf.IndexedSlices | None
GradientsAndVariables = list[tuple[Gradient, tf.Variable]]


def forget_functions(graph: tf.Graph) -> None:
    """Forgets the functions of a graph's custom gradients, once no more gradients are taken."""
    # TensorFlow registers each of them for ever, and with it the graph
    for each in (graph, *(function.graph for function in graph._functions.values())):
        for op in each.get_operations():
            if op.type == "IdentityN":
                with contextlib.suppress(ValueError):  # of a custom gradient it has this attribute
                    ops.gradient_registry._registry.pop(op.get_attr("_gradient_op_type").decode(), None)


def average_gradients(tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the mean over towers of each variable's gradient: in a graph, in eager mode and in a tf.function.

    Args:
      tower_grads: over towers, a list over variables of (gradient, variable), in the same order in all. A gradient has
        its variable's shape, or is IndexedSlices, or None.

    Returns:
      Over variables, (mean gradient, variable). IndexedSlices stay sparse. A variable that has no gradient in any tower
        is left out, with one warning that names it.

    Raises:
      GraphError: no towers, towers with different variables, or a gradient that only some towers have.
    """
    with v1.name_scope("average_gradients"):
        return [
            (_mean([grad for grad, _ in grads_and_vars], variable_name(grads_and_vars[0][1])), grads_and_vars[0][1])
            for grads_and_vars in zip(*without_unused(tower_grads), strict=True)
        ]


def without_unused(tower_grads: list[GradientsAndVariables]) -> list[GradientsAndVariables]:
    """Returns the lists without the variables that have no gradient in any tower, after one warning for each. Raises as
    average_gradients."""
    if not tower_grads:
        raise errors.GraphError("average_gradients got no towers; it needs the gradients of at least one.")
    _check_same_variables(tower_grads)
    trained = []
    for i, (_, variable) in enumerate(tower_grads[0]):
        missing = [f"tower_{tower}" for tower, grads in enumerate(tower_grads) if grads[i][0] is None]
        if not missing:
            trained.append(i)
        elif len(missing) == len(tower_grads):
            name = variable_name(variable)
            notice_once(
                variable, f"The loss does not depend on {name}: it has no gradient in any tower and is not trained."
            )
        else:
            raise errors.GraphError(
                f"{variable_name(variable)} has no gradient in {', '.join(missing)} but has one in the other towers. "
                "Every tower's loss must use the same variables."
            )
    return [[grads[i] for i in trained] for grads in tower_grads]


def add_regularizers(
    mean_grads: GradientsAndVariables, losses: list[tf.Tensor]
) -> tuple[tf.Tensor | float, GradientsAndVariables]:
    """Adds the gradients of the variables' regularizers, once for all towers; --weight_decay is in update.py.

    Args:
      mean_grads: from average_gradients.
      losses: the values of the regularizers, scalars.

    Returns:
      Their sum, scalar, and the gradients, dense if a regularizer was added.
    """
    if not losses:
        return 0.0, mean_grads
    with v1.name_scope("weight_decay"):
        total = tf.add_n(losses)
        decays = v1.gradients(total, [variable for _, variable in mean_grads])
        return total, [
            (grad if decay is None else tf.convert_to_tensor(grad) + decay, variable)
            for (grad, variable), decay in zip(mean_grads, decays, strict=True)
        ]


def clip(gradients: GradientsAndVariables, name: Callable[[tf.Variable], str], limit: float) -> GradientsAndVariables:
    """Scales all gradients by limit / norm if their global norm is greater than the limit."""
    del name
    summed = [(sum_rows(gradient), variable) for gradient, variable in gradients]
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in summed], limit)
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients, strict=True)]


def sum_rows(gradient: Gradient) -> Gradient:
    """Sums the rows of a sparse gradient that have one index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # several towers or examples may move one row, and the norm is that of the sum
    indices, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(sums, indices, gradient.dense_shape)


def describe_not_finite(finite: np.ndarray, names: Sequence[str], num_workers: int = 1) -> str:
    """Names the towers and tensors at fault in a step, in words.

    Args:
      finite: bool [towers + 1, 1 + gradients], the value of update.update_if_finite.
      names: of its columns.
      num_workers: that train together.
    """
    *towers, mean = [enumeration([names[i] for i in np.flatnonzero(~row)], _MOST_NAMES) for row in finite]
    faults = [f"tower_{i}: {bad}" for i, bad in enumerate(towers) if bad]
    # the mean of what is not finite is not either, so it is at fault only if no tower is
    return "; ".join(faults) or f"the mean over towers{' of all workers' if num_workers > 1 else ''}: {mean}"


def is_finite(value: Gradient | tf.Variable) -> tf.Tensor:
    """Returns a bool scalar, whether a value has neither NaN nor infinity; computed on its device."""
    # only the answer leaves the device
    with tf.device(value.device):
        values = value.values if isinstance(value, tf.IndexedSlices) else value
        return tf.reduce_all(tf.math.is_finite(tf.abs(values) if values.dtype.is_complex else values))


def all_finite(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns a bool scalar, whether all values are finite."""
    # the small ones, which most variables are, as one: on a GPU each check is a kernel or two
    small, others = collections.defaultdict(list), []
    for value in values:
        is_small = isinstance(value, tf.Tensor) and (value.shape.num_elements() or _MUCH) < _MUCH
        (small[value.dtype, value.device] if is_small else others).append(value)
    for (_, device), those in small.items():
        with tf.device(device):
            others.append(tf.concat([tf.reshape(value, [-1]) for value in those], 0))
    return tf.reduce_all(are_finite(others))


def are_finite(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns bool [values], `is_finite` of each."""
    with tf.device(values[-1].device):  # one message to the host, not one for each
        return tf.stack([is_finite(value) for value in values])


def variable_name(variable) -> str:
    """Returns a variable's name for people, and for other workers."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")  # Keras' name lacks the layer's


def _check_same_variables(tower_grads: list[GradientsAndVariables]) -> None:
    """Raises GraphError if towers have other variables, or others in their places."""
    names = [variable_name(variable) for _, variable in tower_grads[0]]
    shared = {name for name in names if names.count(name) > 1}  # names may repeat outside of graphs
    for tower, grads_and_vars in enumerate(tower_grads):
        others = [variable_name(variable) for _, variable in grads_and_vars]
        if others == names and all(
            variable is first or name not in shared
            for name, (_, variable), (_, first) in zip(names, grads_and_vars, tower_grads[0], strict=True)
        ):
            continue
        differing = sorted(set(others) ^ set(names)) or ["the same variables in another order"]
        raise errors.GraphError(
            f"tower_{tower} and tower_0 have gradients for different variables: {', '.join(differing)}. "
            "Compute the gradients of one list of variables in every tower."
        )


def _mean(grads: list[Gradient], name: str) -> Gradient:
    sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
    if any(sparse) and not all(sparse):
        raise errors.GraphError(f"{name} has a sparse gradient in some towers and a dense one in others.")
    if len(grads) == 1:
        return grads[0]
    if all(sparse):
        # stays sparse: a dense mean of an embedding would be as large as it
        values = tf.concat([grad.values for grad in grads], axis=0)
        indices = tf.concat([grad.indices for grad in grads], axis=0)
        return tf.IndexedSlices(values / len(grads), indices, grads[0].dense_shape)
    return tf.add_n(grads) / len(grads)  # a sum and one division: exact for 2, 4, 8 towers
