"""The whole batch of a step, from the towers' parts of it: joined rows, means and sums, gradients."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train.fronts import compat, meeting, parts
from tower_train.fronts.averages import Averages
from tower_train.fronts.keras_towers.exchange import Exchange
from tower_train.graph import gradients
from tower_train.graph.random_state import ancestors

_NO_EXAMPLES = ("Shape", "ShapeN", "Size", "Unique")  # depend on no example's values


class Whole(Averages):
    """The batch of a step, of which `here` towers of each process have parts. Their values and gradients become those
    of the whole batch; rows are joined on `device`."""

    def __init__(self, data, here: int, exchange: Exchange, device: str):
        self._exchange, self._device, self._first = exchange, device, here * exchange.rank
        self.count = here * exchange.size  # of all towers
        self.parts = parts.split(data, self._first, here, self.count)
        super().__init__([part.share for part in self.parts], self._add)

    def rows(self, tensors: Sequence[Sequence]) -> list:
        """Joins the towers' rows of tensors, less those of towers without examples, and what Keras attached to them.

        tensors: of each, over towers. All travel together.
        """
        attached = [[compat.attached(value) for value in values] for values in tensors]
        names = [(i, name) for i, per_tower in enumerate(attached) for name in per_tower[0]]
        local = []
        for values in (*tensors, *([each[name] for each in attached[i]] for i, name in names)):
            filled = [
                parts.cut_rows(value, 0, tf.where(part.share > 0, parts.batch_size(value), 0))
                for part, value in zip(self.parts, values, strict=True)
            ]
            with tf.device(self._device):
                local.append(parts.joined(filled))
        with tf.device(self._device):
            whole = self._exchange.rows(local)
        for (i, name), each in zip(names, whole[len(tensors) :], strict=True):
            compat.attach(whole[i], {name: each})
        return whole[: len(tensors)]

    def values(self, structures: Sequence):
        """Returns the batch's value of a structure that each tower has: scalars are means over examples; of what is no
        tensor it is the first tower's."""
        if self.count == 1:
            return structures[0]
        per_tower = list(map(keras.tree.flatten, structures))
        found = dict(enumerate(per_tower[0]))
        scalars = [i for i, value in found.items() if tf.is_tensor(value) and value.shape.rank == 0]
        others = [i for i, value in found.items() if tf.is_tensor(value) and i not in scalars]
        found |= zip(scalars, self.means([[leaves[i] for i in scalars] for leaves in per_tower]), strict=True)
        found |= zip(others, self.rows([[leaves[i] for leaves in per_tower] for i in others]), strict=True)
        return keras.tree.pack_sequence_as(structures[0], list(found.values()))

    def gradient_of_mean(self, grad: tf.Tensor) -> tf.Tensor:
        """Returns in a tower the gradient of its scalar, from that of the mean."""
        share = self.shares[meeting.current().place]
        return tf.cast(share, grad.dtype) * self.sum([grad], "the gradient of a mean")[0]

    def gradients_of_rows(self, grads: Sequence[tf.Tensor], counts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns over towers the gradient of their rows of a joined tensor.

        grads: of the joined tensor, over towers. counts: of rows, over towers.
        """
        [total] = self._add([tf.add_n(list(map(tf.convert_to_tensor, grads)))])
        counts = [tf.where(part.share > 0, count, 0) for part, count in zip(self.parts, counts, strict=True)]
        [all_counts] = self._exchange.rows([tf.stack(counts)])
        begins = tf.unstack(tf.cumsum(all_counts, exclusive=True)[self._first :][: len(counts)], len(counts))
        return [total[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]

    def gradients(self, per_tower, weights=None):
        """Returns the gradients of the whole batch's loss, with the slices that one device would have."""
        pairs = zip(super().gradients(per_tower, weights), per_tower[0], strict=True)
        return [
            (whole if _is_of_examples(first) else gradients.sum_rows(whole), variable)
            for (whole, variable), (first, _) in pairs
        ]

    def _add(self, tensors: Sequence) -> list:
        """Returns sums over processes; of IndexedSlices those with the rows of all."""
        slices = [each for each in tensors if isinstance(each, tf.IndexedSlices)]
        rows = iter(self._exchange.rows([part for each in slices for part in (each.values, each.indices)]))
        sums = iter(self._exchange.sum([each for each in tensors if isinstance(each, tf.Tensor)]))
        return [
            next(sums) if isinstance(each, tf.Tensor) else tf.IndexedSlices(next(rows), next(rows), each.dense_shape)
            for each in tensors
        ]


def _is_of_examples(grad: gradients.Gradient) -> bool:
    """Returns whether a gradient is rows of which one device too would have one for each use by an example; Keras' Adam
    squares each by itself.

    Other rows are of no examples, as positions', or unique, as those of a sparse input's product.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return False
    op = grad.indices.op
    constants = {id(inside) for outside, inside in op.graph.captures if hasattr(outside, "numpy")}
    begun = [each.outputs[0] for each in ancestors([op], but=_NO_EXAMPLES) if each.type == "Placeholder"]
    return any(id(tensor) not in constants or tensor.dtype == tf.resource for tensor in begun)
