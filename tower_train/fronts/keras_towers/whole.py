"""The whole batch of a step, from the towers' parts of it: joined rows, means and sums, gradients."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train.fronts import compat, parts, placement
from tower_train.fronts.keras_towers.exchange import Exchange
from tower_train.graph import gradients
from tower_train.graph.gradients import Gradient, GradientsAndVariables
from tower_train.graph.random_state import ancestors

_NO_EXAMPLES = ("Shape", "ShapeN", "Size", "Unique")  # depend on no example's values


class Whole:
    """The batch of a step, of which `here` towers of each process have parts. Their values and gradients become those
    of the whole batch; rows are joined on `device`."""

    def __init__(self, data, here: int, exchange: Exchange, device: str):
        self._exchange, self._device, self._first = exchange, device, here * exchange.rank
        self.count = here * exchange.size  # of all towers
        self.parts = parts.split(data, self._first, here, self.count)
        # The weights of the towers' losses in that of the whole batch. Keras' own step weighs the losses itself.
        self.weights = [part.share for part in self.parts]

    def rows(self, tensors: Sequence[Sequence]) -> list:
        """Joins the towers' rows of tensors, less those of towers without examples, and what Keras attached to them.

        tensors: of each, over towers. All travel together.
        """
        local = []
        for values in tensors:
            filled = [
                parts.cut_rows(value, 0, tf.where(part.share > 0, parts.batch_size(value), 0))
                for part, value in zip(self.parts, values, strict=True)
            ]
            with tf.device(self._device):
                local.append(parts.joined(filled))
        with tf.device(self._device):
            whole = self._exchange.rows(local)
        attached = [[compat.attached(value) for value in values] for values in tensors]
        names = [(i, name) for i, per_tower in enumerate(attached) for name in per_tower[0]]
        joined = self.rows([[each[name] for each in attached[i]] for i, name in names]) if names else []
        for (i, name), each in zip(names, joined, strict=True):
            compat.attach(whole[i], {name: each})
        return whole

    def values(self, structures: Sequence):
        """Returns the batch's value of a structure that each tower has: scalars are means over examples; of what is no
        tensor it is the first tower's."""
        leaves = list(zip(*map(keras.tree.flatten, structures), strict=True))
        found = {i: values[0] for i, values in enumerate(leaves)}
        scalars = [i for i, value in found.items() if tf.is_tensor(value) and value.shape.rank == 0]
        others = [i for i, value in found.items() if tf.is_tensor(value) and i not in scalars]
        found |= zip(scalars, self.means([leaves[i] for i in scalars]), strict=True)
        found |= zip(others, self.rows([leaves[i] for i in others]), strict=True)
        return keras.tree.pack_sequence_as(structures[0], list(found.values()))

    def means(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the means over examples of floating-point values, and the sums of others, over which there are those
        of the towers."""
        shares = [part.share for part in self.parts]
        counted = [tf.math.ceil(share) for share in shares]  # 0 for a tower without examples
        sums = [_weighted_sum(each, shares if each[0].dtype.is_floating else counted) for each in values]
        return self._exchange.sum(sums)

    def gradients_of_rows(self, grads: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns over towers the gradient of their rows of a joined tensor.

        grads: of the joined tensor, over towers. counts: of rows, over towers.
        """
        [total] = self._exchange.sum([_weighted_sum(list(map(tf.convert_to_tensor, grads)), self.weights)])
        counts = [tf.where(part.share > 0, count, 0) for part, count in zip(self.parts, counts, strict=True)]
        [all_counts] = self._exchange.rows([tf.stack(counts)])
        begins = tf.unstack(tf.cumsum(all_counts, exclusive=True)[self._first :][: len(counts)], len(counts))
        return [
            tf.math.divide_no_nan(total[begin : begin + count], tf.cast(weight, total.dtype))
            for begin, count, weight in zip(begins, counts, self.weights, strict=True)
        ]

    def gradients_of_means(self, per_tower: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """As meeting.Towers.gradients_of_means, of losses that are weighted by examples."""
        sums = self._exchange.sum([tf.add_n(grads) for grads in zip(*per_tower, strict=True)])
        return [[total * tf.cast(part.share, total.dtype) for total in sums] for part in self.parts]

    def mean_gradients(self, model: keras.Model, per_tower: Sequence[GradientsAndVariables]) -> GradientsAndVariables:
        """Returns the gradients of the whole batch's loss, with the slices that one device would have."""
        variables, local = [variable for _, variable in per_tower[0]], []
        for variable, pairs in zip(variables, zip(*per_tower, strict=True), strict=True):
            with tf.device(placement.of(variable)):
                local.append(_weighted_gradient([grad for grad, _ in pairs], self.weights))
        slices = [grad for grad in local if isinstance(grad, tf.IndexedSlices)]
        rows = iter(self._exchange.rows([part for each in slices for part in (each.values, each.indices)]))
        sums = iter(self._exchange.sum([grad for grad in local if not isinstance(grad, tf.IndexedSlices)]))
        dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(model) for v in layer.trainable_weights}
        total = []
        for grad, variable in zip(local, variables, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                whole = tf.IndexedSlices(next(rows), next(rows), grad.dense_shape)
                whole = whole if _are_of_examples(grad.indices) else gradients.sum_rows(whole)
            else:
                whole = next(sums)
                if dtypes.get(id(variable)) == "float16":  # one device sums in float16, where the sum may overflow
                    whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
            total.append((whole, variable))
        return total


def _weighted_sum(values: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(weight, v.dtype) * v for weight, v in zip(weights, values, strict=True)])


def _weighted_gradient(grads: Sequence[Gradient], weights: Sequence[tf.Tensor]) -> Gradient:
    if not all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        return _weighted_sum(list(map(tf.convert_to_tensor, grads)), weights)
    values = [tf.cast(weight, grad.dtype) * grad.values for weight, grad in zip(weights, grads, strict=True)]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat([each.indices for each in grads], 0), grads[0].dense_shape)


def _are_of_examples(indices: tf.Tensor) -> bool:
    """Returns whether one device too has a row once for each use by an example, which Keras' Adam squares one by one.

    Other rows are of no examples, as positions', or unique, as those of a sparse input's product.
    """
    constants = {id(inside) for outside, inside in indices.graph.captures if hasattr(outside, "numpy")}
    begun = [op.outputs[0] for op in ancestors([indices.op], but=_NO_EXAMPLES) if op.type == "Placeholder"]
    return any(id(tensor) not in constants or tensor.dtype == tf.resource for tensor in begun)
