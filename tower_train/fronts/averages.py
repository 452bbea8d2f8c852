"""Means and gradients over the towers of all workers, from the values of this process's towers.

Gradients of variables, wherever a program computes them, are those of the whole batch's loss. What it does with them
before it applies them, such as clipping, is thus what one device does. Each tower goes backwards from its part of that
loss, so that towers' gradients add up, and are no larger than one device's where a loss scale makes them large.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, meeting, placement
from tower_train.fronts.draws import draw_whole
from tower_train.fronts.meeting import Tower
from tower_train.graph import context, gradients
from tower_train.graph.gradients import Gradient, GradientsAndVariables

_is_backward: contextvars.ContextVar[bool] = contextvars.ContextVar("is_backward", default=False)

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
        # whether the towers' losses are sums; else they are means
        self.losses_add_up: Callable[[], bool] = lambda: False
        self.have_met = False  # whether gradients were averaged
        self._first_tower: Tower | None = None
        self._means: set[tf.Operation] = set()  # those that compute means of gradients

    def means(self, per_tower: PerTower) -> list[tf.Tensor]:
        """Returns the means of floating-point tensors, and the sums of others over towers with examples."""
        sums = []
        for values in zip(*per_tower, strict=True):
            counted = self.shares if values[0].dtype.is_floating else list(map(tf.math.ceil, self.shares))
            sums.append(tf.add_n(_weighted(values, counted)))
        return self._add(sums)

    def total(self, losses: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss of the whole batch from these towers' losses."""
        weights = [self._unit] * len(losses) if self.losses_add_up() else self.shares
        return self._add([tf.add_n(_weighted(losses, weights))])[0]

    def gradients(
        self, per_tower: Sequence[GradientsAndVariables], weights: Sequence[Weight] | None = None
    ) -> GradientsAndVariables:
        """Returns the sums of gradients, or the weighted ones; sparse ones stay sparse."""
        variables, local = [variable for _, variable in per_tower[0]], []
        for variable, pairs in zip(variables, zip(*per_tower, strict=True), strict=True):
            with tf.device(placement.of(variable)):
                local.append(_total_gradient([grad for grad, _ in pairs], weights, variable.shape))
        return list(zip(self._add(local), variables, strict=True))

    @contextlib.contextmanager
    def inside(self, tower: Tower, inputs: Sequence[tf.Tensor], batch_norm: str) -> Iterator[None]:
        """Averages within this block what the program of a tower computes: its gradients, and what is normalised of
        these inputs, its part of the batch, over all towers or by "tower"."""
        tower.batch = frozenset(each.op for each in inputs)
        self._first_tower = self._first_tower if tower.place else tower
        towers_mean = functools.partial(self.mean, what="batch normalisation")
        entered = context.Context(towers=tower.count, by_tower=batch_norm == "tower", mean=towers_mean)
        with entered.enter_tower(inputs=inputs), compat.gradients_by(self._taken):
            yield

    def mean(self, values: Sequence[tf.Tensor], what: str = "a mean over towers") -> list[tf.Tensor]:
        """Returns the means over all towers of all workers, weighted by their examples, of floating-point tensors of
        equal shapes: as batch normalisation over the whole batch needs. All travel together, in one exchange.

        Their gradients are exact, of any order.
        """
        tower = meeting.current()
        if tower is None or tower.count == 1:
            return list(values)
        return self.sum([_scalar(self.shares[tower.place], each.dtype) * each for each in values], what)

    def sum(self, values: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
        """Returns in a tower the sums over all towers, which meet backwards for the sums of their gradients."""
        tower, values = meeting.current(), list(values)
        tower.means += 1
        what = f"{what} (no. {tower.means})"  # backwards towers must meet for the same one
        sums = meeting.meet(
            values, lambda asked: self._add([tf.add_n(each) for each in zip(*asked, strict=True)]), what
        )
        return linked(values, sums, lambda *grads: self.sum(grads, f"the gradient of {what}"))

    def _taken(self, compute: Callable, targets: Sequence, sources: Sequence, is_recorded: bool) -> list[Gradient]:
        """Computes gradients in a tower. Those of variables are of the whole batch's loss, except in a branch, a loop
        or a tf.function, where towers cannot meet."""
        tower = meeting.current()
        asked = [i for i, source in enumerate(sources) if isinstance(source, (tf.Variable, keras.Variable))]
        if not asked or tower is None or tower.count == 1 or _is_backward.get() or not tower.towers.are_here:
            return compute(None)
        weights = [self._unit if self._adds_up(tower, each) else self.shares[tower.place] for each in targets]
        factors = [_scalar(weight, each.dtype.base_dtype) for weight, each in zip(weights, targets, strict=True)]
        with compat.holding(_is_backward, True):  # gradients that a gradient is computed by are parts of it
            grads = list(compute(factors))
        means = self._mean_gradients(tower, [(grads[i], sources[i]) for i in asked], is_recorded)
        for i, mean in zip(asked, means, strict=True):
            grads[i] = mean
        return grads

    def _adds_up(self, tower: Tower, target: tf.Tensor) -> bool:
        """Returns whether a target is a sum over examples, or has a value for each, which TensorFlow adds up; else it
        is a mean, or of joined rows."""
        if not target.shape.rank:
            return self.losses_add_up()
        rows = tf.compat.dimension_value(target.shape[0])
        sizes = [tf.compat.dimension_value(out.shape[0]) for op in tower.batch for out in op.outputs if out.shape.rank]
        is_of_rows = rows is None or any(size and rows % size == 0 for size in sizes)
        return is_of_rows and self.is_of_rows(tower, target)

    def is_of_rows(self, tower: Tower, tensor: tf.Tensor) -> bool:
        """Returns whether a tower computes a tensor from its part of the batch, not only from what all towers have."""
        own = tower.batch | {kept.op for kept, _ in tower.draws}
        return bool(own & _sources(tensor, tower.same))

    def _differentiable(self, mine: Gradient, mean: Gradient, what: str) -> Gradient:
        """Returns a mean of gradients, with its gradient."""

        def gradient(grad):
            if isinstance(mean, tf.IndexedSlices):
                raise errors.GraphError(
                    f"{what}: the gradient of a gradient that is rows of a table is not averaged over towers. "
                    "Compute such a penalty without the table, or train in one tower."
                )
            return self.sum([grad], f"the gradient of {what}")

        with tf.device(_tensor(mean).device):  # where its variable is
            [copy] = linked([_tensor(mine)], [_tensor(mean)], gradient)
        return tf.IndexedSlices(copy, mean.indices, mean.dense_shape) if isinstance(mean, tf.IndexedSlices) else copy

    def _mean_gradients(self, tower: Tower, pairs: GradientsAndVariables, is_differentiable: bool) -> list[Gradient]:
        """Returns a tower's means of gradients over all towers; None for variables without a gradient in any."""
        tower.means += 1
        names = ", ".join(gradients.variable_name(variable) for _, variable in pairs[:2])
        what = f"the gradients (no. {tower.means}) of {names}{', ...' if len(pairs) > 2 else ''}"

        def merge(per_tower):
            self.have_met = True
            there = [i for i, grads in enumerate(zip(*per_tower, strict=True)) if any(g is not None for g, _ in grads)]
            asked = gradients.without_unused([[each[i] for i in there] for each in per_tower])
            return dict(zip(there, (grad for grad, _ in self.gradients(asked)), strict=True))

        found = meeting.meet(pairs, merge, what)
        means: list[Gradient] = [None] * len(pairs)
        for i, mean in found.items():
            if is_differentiable:
                mean = self._differentiable(pairs[i][0], mean, f"{what}: {i}")
            parts = (mean.values, mean.indices) if isinstance(mean, tf.IndexedSlices) else [mean]
            self._means.update(part.op for part in parts)
            means[i] = mean
        return means

    def updates(self, per_tower: Sequence[GradientsAndVariables]) -> GradientsAndVariables:
        """Returns the gradients to apply. Those computed from means alone, such as clipped ones, are the first tower's;
        others are averaged."""
        self.have_met, per_tower = True, gradients.without_unused(list(per_tower))
        if self._first_tower.count == 1:
            return per_tower[0]
        apart = [i for i, (grad, _) in enumerate(per_tower[0]) if not self._is_of_means(_tensor(grad))]
        averaged = self.gradients([[pairs[i] for i in apart] for pairs in per_tower], self.shares)
        means = dict(zip(apart, averaged, strict=True))
        return [means.get(i, pair) for i, pair in enumerate(per_tower[0])]

    def _is_of_means(self, grad: tf.Tensor) -> bool:
        """Returns whether the first tower computes a tensor from means of gradients and not from its batch; if so,
        noise in it is drawn as one device draws it."""
        tower, reached = self._first_tower, _sources(grad, self._means)
        if reached & tower.batch or not reached & self._means:
            return False
        draw_whole(reached, tower.draws)  # noise on gradients belongs to no example
        return True


def linked(mine: Sequence[tf.Tensor], merged: Sequence[tf.Tensor], gradient: Callable) -> list[tf.Tensor]:
    """Returns a tower's copies of tensors that all towers have made of those of each.

    gradient: gradients of the copies -> a sequence of those of the tower's own.
    """

    @tf.custom_gradient  # of what is merged too, or variables that it was computed from would count as the function's
    def copied(*tensors):
        return list(tensors[len(mine) :]), lambda *grads: (*gradient(*grads), *(None for _ in merged))

    copies = copied(*mine, *merged)
    meeting.current().same.update(copy.op for copy in copies)
    return copies


def _sources(tensor: tf.Tensor, ends: Collection[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that a tensor is computed by, up to those, whose own inputs are left out."""
    reached, left = set(), [tensor.op]
    while left:
        if (op := left.pop()) not in reached:
            reached.add(op)
            left += [] if op in ends else [each.op for each in op.inputs]
    return reached


def _tensor(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _scalar(weight: Weight, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(weight, dtype) if tf.is_tensor(weight) else tf.constant(weight, dtype)  # cast takes it for float32


def _weighted(values: Sequence[tf.Tensor], weights: Sequence[Weight] | None) -> Sequence[tf.Tensor]:
    if weights is None:
        return values
    return [_scalar(weight, each.dtype) * each for weight, each in zip(weights, values, strict=True)]


def _total_gradient(grads: Sequence[Gradient], weights: Sequence[Weight] | None, shape) -> Gradient:
    if not all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        total = tf.add_n(_weighted(list(map(tf.convert_to_tensor, grads)), weights))
        if all(map(_is_of_float16, grads)):  # one device adds its examples up in float16, where the sum may overflow
            total = tf.cast(tf.cast(total, tf.float16), total.dtype)
        return tf.ensure_shape(total, shape)
    rows = tf.concat(_weighted([grad.values for grad in grads], weights), 0)
    indices = tf.concat([grad.indices for grad in grads], 0)
    return tf.IndexedSlices(tf.ensure_shape(rows, [None, *shape[1:]]), indices, grads[0].dense_shape)


def _is_of_float16(grad: Gradient) -> bool:
    """Returns whether layers that compute in float16 give the gradient of a variable, perhaps beside a regularizer."""
    ends = [grad.op, *(each.op for each in grad.op.inputs)] if grad.op.type == "AddN" else [grad.op]
    return any(op.type == "Cast" and op.inputs[0].dtype == tf.float16 for op in ends)
