"""A step in all towers, which meet at each yield: joined rows, means, gradients, metrics, assignments, reports."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.exchange import Exchange
from tower_train.fronts.lockstep.requests import Finished, Join, Loss, Once, completed
from tower_train.fronts.lockstep.tower import Step, Tower, TowerScope
from tower_train.graph import gradients
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.random_state import ancestors

_NO_EXAMPLES = ("Shape", "ShapeN", "Size", "Unique")  # depend on no example's values


class Meeting:
    """A step of a model, which has all its variables, on consecutive parts of a batch, of which this process's devices
    compute theirs; towers' rows are joined on merge_device."""

    def __init__(
        self, model: keras.Model, step: Step, data, devices: Sequence[str], merge_device: str, exchange: Exchange
    ):
        self.model, self.exchange, self._device = model, exchange, merge_device
        here, count = len(devices), len(devices) * exchange.size
        cut = parts.split(data, here * exchange.rank, here, count)
        self.towers = [Tower(model, step, part, device) for part, device in zip(cut, devices, strict=True)]
        self._is_alone = count == 1

    def run(self) -> list:
        """Runs the step to its end; returns over towers what it returned."""
        answers = [None] * len(self.towers)
        self._begin_phase()
        while True:
            steps = zip(self.towers, answers, strict=True)
            asked = [completed(self.model, tower.advance(answer)) for tower, answer in steps]
            kind = type(asked[0])
            if kind is Join:
                answers = self.join([request.tensors for request in asked])
                continue
            by_loss = zip(*asked, strict=True) if kind is list else ()
            updates = [(losses[0].optimizer, self.gradients(losses)) for losses in by_loss]
            with tf.device(HOST):
                self.update_metrics()
                self.assign()
                if kind is Finished:
                    return [request.result for request in asked]
                for optimizer, grads_and_vars in updates:
                    optimizer.apply_gradients(grads_and_vars)
                answers = [self._once(asked[0]) if kind is Once else None] * len(self.towers)
            self._begin_phase()

    def _begin_phase(self) -> None:
        """Reads the weights, with respect to which the losses up to the next update are differentiated."""
        self._weights: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        for weight in self.model.trainable_weights:
            with tf.device(weight.value.device):
                self._weights[id(weight)] = weight, tf.identity(weight.value)
        for tower in self.towers:
            tower.begin_phase(self._weights.values())

    def join(self, structures: Sequence) -> list:
        """Returns over towers, on their devices, the structures of joined tensors; gradients go to their rows."""
        structures = [keras.tree.map_structure(parts.as_tensor, each) for each in structures]
        if any(leaf is not None and leaf.shape.rank == 0 for leaf in keras.tree.flatten(structures[0])):
            raise errors.ConfigError(
                "tower_step yields a Join of a scalar; join tensors that have a row for each example."
            )
        joined = keras.tree.map_structure(self._whole, *structures)
        return [keras.tree.map_structure(functools.partial(_copied, tower.device), joined) for tower in self.towers]

    def rows(self, values: Sequence):
        """Joins the towers' rows, less those of towers without examples, and what Keras attached to them."""
        local = [
            parts.rows_of(value, 0, tf.where(tower.part.share > 0, parts.batch_size(value), 0))
            for tower, value in zip(self.towers, values, strict=True)
        ]
        with tf.device(self._device):
            is_sparse = isinstance(local[0], tf.SparseTensor)
            whole = self.exchange.rows(tf.sparse.concat(0, local) if is_sparse else tf.concat(local, 0))
        attached = [compat.attached(value) for value in values]
        compat.attach(whole, {name: self.rows([each[name] for each in attached]) for name in attached[0]})
        return whole

    def _whole(self, *values):
        """Returns the batch's value of those of the towers: the first one of what is no tensor."""
        if not tf.is_tensor(values[0]):
            return values[0]
        return self.totals([values])[0] if values[0].shape.rank == 0 else self.rows(values)

    def totals(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the means over examples of floating-point values, and the sums of others, over which there are those
        of the towers."""
        shares = [tower.part.share for tower in self.towers]

        def local(of_towers):
            weights = shares if of_towers[0].dtype.is_floating else map(tf.math.ceil, shares)
            return tf.add_n([tf.cast(w, v.dtype) * v for w, v in zip(weights, of_towers, strict=True)])

        return self.exchange.sum([local(of_towers) for of_towers in values])

    def gradients(self, losses: Sequence[Loss]) -> GradientsAndVariables:
        """Computes the gradient of the whole batch's loss: the mean of the towers' losses, weighted by their examples.

        Args:
          losses: over towers, of this phase, with variables and an optimizer, whose scale the gradient has.

        Raises:
          ConfigError: no loss depends on any of the variables.
        """
        variables, scale = losses[0].variables, losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
        weights = {id(v): self._weights[id(v)][1] for v in variables if id(v) in self._weights}
        # Not by a tape, which would place all towers' gradients on one device.
        grads = tf.gradients(
            [loss.value for loss in losses],
            list(weights.values()),
            [scale * tf.cast(tower.part.share, scale.dtype) for tower in self.towers],
        )
        if all(grad is None for grad in grads):
            raise errors.ConfigError(
                f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
                "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
                "two losses in one list."
            )
        of_weights = dict(zip(weights, grads, strict=True))
        # Names variables without gradients.
        [trained] = gradients.with_gradients([[(of_weights.get(id(v)), v) for v in variables]])
        with tf.device(HOST):
            return trained if self._is_alone else self._total(trained)

    def _total(self, trained: GradientsAndVariables) -> GradientsAndVariables:
        """Returns the sums over all processes of gradients, with the slices that one device would have."""
        dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(self.model) for v in layer.trainable_weights}
        sums = iter(self.exchange.sum([grad for grad, _ in trained if not isinstance(grad, tf.IndexedSlices)]))
        total = []
        for grad, variable in trained:
            if isinstance(grad, tf.IndexedSlices):
                rows = (self.exchange.rows(each) for each in (grad.values, grad.indices))
                whole = tf.IndexedSlices(*rows, grad.dense_shape)
                whole = whole if _are_of_examples(grad.indices) else gradients.sum_rows(whole)
            else:
                whole = next(sums)
                if dtypes.get(id(variable)) == "float16":  # one device sums in float16, where the sum may overflow
                    whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
            total.append((whole, variable))
        return total

    def _once(self, request: Once):
        """Calls the function; what it assigns and returns is what it assigns and returns in the first of all towers."""
        with TowerScope([]) as scope:
            returned = request.function()
        values = [*(value for _, value in scope.assigned.values()), *keras.tree.flatten(returned)]
        of_first = iter(self.exchange.first([value for value in values if tf.is_tensor(value)]))
        values = [next(of_first) if tf.is_tensor(value) else value for value in values]
        for (variable, _), value in zip(scope.assigned.values(), values, strict=False):
            variable.assign(value)
        return keras.tree.pack_sequence_as(returned, values[len(scope.assigned) :])

    def update_metrics(self) -> None:
        """Does the updates of metrics that all towers asked for, each once: of all rows, and of scalars' totals."""
        for calls in zip(*(tower.updates for tower in self.towers), strict=True):
            args, kwargs = keras.tree.map_structure(self._whole, *(arguments for _, *arguments in calls))
            calls[0][0].update_state(*args, **kwargs)

    def assign(self) -> None:
        """Assigns what layers assigned in the towers: the mean over examples to floating-point variables such as moving
        averages, the first tower's value to others. A line names variables of which it is unknown what one device would
        make of them."""
        assigned = self.towers[0].scope.assigned
        averaged = [key for key, (_, value) in assigned.items() if value.dtype.is_floating]
        others = [key for key in assigned if key not in averaged]
        means = self.totals([[tower.scope.assigned[key][1] for tower in self.towers] for key in averaged])
        firsts = self.exchange.first([assigned[key][1] for key in others])
        # The latter's are the same whatever the examples.
        known = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
        of_known = {id(v) for each in compat.sublayers(self.model) if isinstance(each, known) for v in each.variables}
        for key, value in zip([*averaged, *others], [*means, *firsts], strict=True):
            variable, _ = assigned[key]
            variable.assign(value)
            if not (self._is_alone or key in of_known or compat.is_seed_state(variable)):
                of_towers = "the mean of what the towers assign" if key in averaged else "what the first tower assigns"
                console.notice_once(
                    variable,
                    f"{variable.path} gets {of_towers}, each for its part of the batch: one device may differ. In a "
                    "tower_step yield steps.Once(function) with a function that assigns.",
                )

    def logs(self, returned: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Merges what the towers' own steps returned, once metrics are up to date: {name: scalar} of metrics, up to
        this step; and of others, the means over this batch's examples.

        Raises:
          ConfigError: they returned something else than scalars.
        """
        logs, means = {}, {}
        values = returned[0].values() if isinstance(returned[0], dict) else ()
        if not values or any(keras.ops.ndim(value) for value in values if not isinstance(value, keras.Metric)):
            raise errors.ConfigError(
                f"{type(self.model).__name__}.tower_step returns {returned[0]}; give a dict of scalars to report, such "
                'as {"loss": loss}: means over the tower\'s examples.'
            )
        for name, value in returned[0].items():
            if isinstance(value, keras.Metric):
                result = value.result()
                logs |= result if isinstance(result, dict) else {name: result}
            else:
                means[name] = [tf.cast(each[name], keras.config.floatx()) for each in returned]
        return logs | dict(zip(means, self.totals(list(means.values())), strict=True))


def _copied(device: str, whole):
    """Copies a joined tensor, and what Keras attached to it, to a device."""
    if whole is None:
        return None
    with tf.device(device):
        copy = tf.identity(whole)
    compat.attach(copy, {name: _copied(device, each) for name, each in compat.attached(whole).items()})
    return copy


def _are_of_examples(indices: tf.Tensor) -> bool:
    """Returns whether one device too has a row once for each use by an example, which Keras' Adam squares one by one.

    Other rows are of no examples, as positions', or unique, as those of a sparse input's product.
    """
    constants = {id(inside) for outside, inside in indices.graph.captures if hasattr(outside, "numpy")}
    begun = [op.outputs[0] for op in ancestors([indices.op], but=_NO_EXAMPLES) if op.type == "Placeholder"]
    return any(id(tensor) not in constants or tensor.dtype == tf.resource for tensor in begun)
