"""average_gradients: from the towers' gradients to one mean, and the check that it is finite."""

import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import console, errors

v1 = tf.compat.v1

Gradient = tf.Tensor | tf.IndexedSlices | None
GradientsAndVariables = list[tuple[Gradient, tf.Variable]]

_untrained = weakref.WeakValueDictionary()  # {id: variable} of those that a notice has named


def average_gradients(tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the mean over towers of each variable's gradient: in a graph, in eager mode and in a tf.function.

    Args:
      tower_grads: over towers, a list over variables of (gradient, variable), in the same order in all. A gradient has
        its variable's shape, or is IndexedSlices, or None.

    Returns:
      The list over variables of (mean gradient, variable), in that order. IndexedSlices stay sparse. A variable that
        has no gradient in any tower is left out, with one warning that names it.

    Raises:
      GraphError: no towers, towers with different variables, or a gradient that only some towers have.
    """
    with v1.name_scope("average_gradients"):
        return [
            (_mean([grad for grad, _ in grads_and_vars], name_of(grads_and_vars[0][1])), grads_and_vars[0][1])
            for grads_and_vars in zip(*with_gradients(tower_grads), strict=True)
        ]


def with_gradients(tower_grads: list[GradientsAndVariables]) -> list[GradientsAndVariables]:
    """Leaves out the variables that have no gradient in any tower.

    Args, Raises: as average_gradients.
    """
    if not tower_grads:
        raise errors.GraphError("average_gradients got no towers; it needs the gradients of at least one.")
    trained = []
    for grads_and_vars in _by_variable(tower_grads):
        variable = grads_and_vars[0][1]
        grads = [grad for grad, _ in grads_and_vars]
        missing = [i for i, grad in enumerate(grads) if grad is None]
        if len(missing) == len(grads):
            _name_untrained(variable)
            continue
        if missing:
            raise errors.GraphError(
                f"{name_of(variable)} has no gradient in {', '.join(f'tower_{i}' for i in missing)} but has one in the "
                "other towers. Every tower's loss must use the same variables."
            )
        trained.append(grads_and_vars)
    return [[row[i] for row in trained] for i in range(len(tower_grads))]


def add_weight_decay(
    mean_grads: GradientsAndVariables, losses: list[tf.Tensor]
) -> tuple[tf.Tensor | float, GradientsAndVariables]:
    """Adds the gradients of the variables' regularizers, once for all towers.

    Args:
      mean_grads: from average_gradients.
      losses: the values of the regularizers, scalars.

    Returns:
      The sum of the regularizers, scalar, and the gradients with theirs added.
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


def update_if_finite(
    tower_grads: list[GradientsAndVariables],
    tower_losses: Sequence[tf.Tensor],
    applied_grads: GradientsAndVariables,
    loss: tf.Tensor,
    apply: Callable[[], tf.Operation],
    skip: Callable[[], tf.Operation] = tf.no_op,
) -> tf.Tensor:
    """Applies the update only if the loss and all gradients are finite.

    Sums carry NaN and Inf along, so it suffices to check what would be applied; towers are checked one by one only when
    that is not finite.

    Args:
      tower_grads: arguments of average_gradients.
      tower_losses: over towers, scalars.
      applied_grads: gradients that `apply` would apply.
      loss: scalar.
      apply: makes the ops of the update.
      skip: makes the ops of a step without an update.

    Returns:
      bool [towers + 1, 1 + gradients]: whether the tower's loss, then each of its gradients, is finite; the last row is
        of what would be applied, whose sums may overflow by themselves. If one is False no variable was changed.
    """
    trained = {variable.ref() for _, variable in applied_grads}
    values = [[tower_losses[i]] + [g for g, v in grads if v.ref() in trained] for i, grads in enumerate(tower_grads)]
    with v1.name_scope("check_finite"):
        applicable = _are_finite([loss, *(grad for grad, _ in applied_grads)])

    def applied():
        with tf.control_dependencies([apply()]):
            return tf.ones([len(values) + 1, len(values[0])], tf.bool)

    def refused():
        with tf.control_dependencies([skip()]):
            return tf.stack([*(_are_finite(row) for row in values), applicable])

    return tf.cond(tf.reduce_all(applicable), applied, refused, name="train")


def is_finite(value: Gradient | tf.Variable) -> tf.Tensor:
    """Returns a bool scalar, whether a value has neither NaN nor infinity; computed on its device."""
    with tf.device(value.device):
        return tf.reduce_all(tf.math.is_finite(value.values if isinstance(value, tf.IndexedSlices) else value))


def _are_finite(values: Sequence[Gradient]) -> tf.Tensor:
    """Returns bool [values], `is_finite` of each; they leave their device together."""
    with tf.device(values[-1].device):
        return tf.stack([is_finite(value) for value in values])


def name_of(variable) -> str:
    """Returns a variable's name for people, and for other workers."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")  # Keras' name lacks the layer's


def _name_untrained(variable) -> None:
    """Names it once, even if an eager program does many steps."""
    if _untrained.get(id(variable)) is not variable:
        _untrained[id(variable)] = variable
        console.notice(
            f"The loss does not depend on {name_of(variable)}: it has no gradient in any tower and is not trained."
        )


def _by_variable(tower_grads: list[GradientsAndVariables]) -> list[GradientsAndVariables]:
    """Transposes towers x variables to variables x towers."""
    names = [[name_of(variable) for _, variable in grads_and_vars] for grads_and_vars in tower_grads]
    shared = {name for name in names[0] if names[0].count(name) > 1}  # names may repeat outside of graphs
    first = [variable for _, variable in tower_grads[0]]
    for i, others in enumerate(names):
        same = others == names[0] and all(
            variable is other or name not in shared
            for name, variable, (_, other) in zip(others, first, tower_grads[i], strict=True)
        )
        if not same:
            differing = sorted(set(others) ^ set(names[0])) or ["the same variables in another order"]
            raise errors.GraphError(
                f"tower_{i} and tower_0 have gradients for different variables: {', '.join(differing)}. "
                "Compute the gradients of one list of variables in every tower."
            )
    return [list(row) for row in zip(*tower_grads, strict=True)]


def _mean(grads: list[Gradient], name: str) -> Gradient:
    sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
    if any(sparse) and not all(sparse):
        raise errors.GraphError(f"{name} has a sparse gradient in some towers and a dense one in others.")
    if len(grads) == 1:
        return grads[0]
    if all(sparse):
        values = tf.concat([grad.values for grad in grads], axis=0)
        indices = tf.concat([grad.indices for grad in grads], axis=0)
        return tf.IndexedSlices(values / len(grads), indices, grads[0].dense_shape)
    return tf.add_n(grads) / len(grads)
