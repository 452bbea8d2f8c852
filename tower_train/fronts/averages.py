"""Means and gradients over the towers of all workers, from the values of this process's towers."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.fronts import placement
from tower_train.graph.gradients import Gradient, GradientsAndVariables

Weight = float | tf.Tensor  # a scalar
PerTower = Sequence[Sequence[tf.Tensor]]  # over this process's towers, tensors


class Averages:
    """Means over towers, weighted by their examples.

    Args:
      shares: over this process's towers, their weights in means.
      add: tensors and IndexedSlices of this process -> their sums over workers.
      unit: what `shares` are of the whole; the number of workers if `add` is a mean over them.
    """

    def __init__(self, shares: Sequence[Weight], add: Callable[[list], list] = list, unit: float = 1.0):
        self.shares, self._add, self._unit = list(shares), add, unit
        # whether the whole batch's loss is the sum of the towers' losses; else it is their mean
        self.losses_add_up: Callable[[], bool] = lambda: False

    @property
    def weights(self) -> list[Weight]:
        """The weights of the towers' losses, and so of their gradients, in the whole batch's."""
        return [self._unit] * len(self.shares) if self.losses_add_up() else self.shares

    def means(self, per_tower: PerTower) -> list[tf.Tensor]:
        """Returns the means of floating-point tensors, and the sums of others over towers with examples."""
        sums = []
        for values in zip(*per_tower, strict=True):
            counted = self.shares if values[0].dtype.is_floating else list(map(tf.math.ceil, self.shares))
            sums.append(_weighted_sum(values, counted))
        return self._add(sums)

    def total(self, losses: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss of the whole batch from these towers' losses."""
        return self._add([_weighted_sum(losses, self.weights)])[0]

    def share_of_loss(self, place: int) -> Weight | None:
        """Returns a tower's weight in means divided by its loss's weight; None if they are equal."""
        return self.shares[place] / self._unit if self.losses_add_up() else None

    def gradients(self, per_tower: Sequence[GradientsAndVariables]) -> GradientsAndVariables:
        """Returns the gradients of the whole batch's loss; sparse ones stay sparse."""
        variables, local = [variable for _, variable in per_tower[0]], []
        for variable, pairs in zip(variables, zip(*per_tower, strict=True), strict=True):
            with tf.device(placement.of(variable)):
                local.append(_weighted_gradient([grad for grad, _ in pairs], self.weights, variable.shape))
        return list(zip(self._add(local), variables, strict=True))


def _weighted_sum(values: Sequence[tf.Tensor], weights: Sequence[Weight]) -> tf.Tensor:
    if isinstance(first := weights[0], float) and all(weight is first or weight == first for weight in weights):
        return tf.add_n(values) * first if first != 1 else tf.add_n(values)
    return tf.add_n([tf.cast(weight, each.dtype) * each for weight, each in zip(weights, values, strict=True)])


def _weighted_gradient(grads: Sequence[Gradient], weights: Sequence[Weight], shape) -> Gradient:
    if not all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        return tf.ensure_shape(_weighted_sum(list(map(tf.convert_to_tensor, grads)), weights), shape)
    values = [tf.cast(weight, grad.dtype) * grad.values for weight, grad in zip(weights, grads, strict=True)]
    rows = tf.ensure_shape(tf.concat(values, 0), [None, *shape[1:]])
    return tf.IndexedSlices(rows, tf.concat([grad.indices for grad in grads], 0), grads[0].dense_shape)
