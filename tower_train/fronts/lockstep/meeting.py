"""From the towers' tensors to the batch's: joined rows, means over examples, metrics, assigned variables, reports."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.exchange import Exchange, Merge
from tower_train.fronts.lockstep.tower import Tower

_noticed = weakref.WeakValueDictionary()  # {id: variable} of those that a notice has named


class Meeting:
    """The towers of a step where they meet.

    Args:
      model: whose step it is.
      towers: of this process.
      exchange: with other processes.
      device: where rows are joined.
      is_own_step: whether the program wrote the step, so that its assignments are refused.
    """

    def __init__(self, model: keras.Model, towers: Sequence[Tower], exchange: Exchange, device: str, is_own_step: bool):
        self.model, self.towers, self.exchange, self.device = model, towers, exchange, device
        self._is_own_step = is_own_step

    @property
    def is_alone(self) -> bool:
        """True if there is one tower in all."""
        return self.towers[0].part.count == 1

    def rows(self, tensors: Sequence) -> list:
        """Returns the towers' tensors, each [rows, ...], less the rows of towers without examples."""
        return [
            parts.rows_of(tensor, 0, tf.where(tower.part.examples > 0, parts.batch_size(tensor), 0))
            for tower, tensor in zip(self.towers, tensors, strict=True)
        ]

    def join(self, structures: Sequence) -> list:
        """Returns the structures of joined tensors, over towers, with respect to which they can be differentiated."""
        if self.is_alone:
            return list(structures)
        leaves = [
            [parts.as_tensor(leaf) for leaf in keras.tree.flatten(each) if leaf is not None] for each in structures
        ]
        if any(leaf.shape.rank == 0 for leaf in leaves[0]):
            raise errors.ConfigError(
                "tower_step yields a Join of a scalar; join tensors that have a row for each example."
            )
        wholes = self.merged([(Merge.ROWS, values) for values in zip(*leaves, strict=True)])
        answers = []
        for tower, local, structure in zip(self.towers, leaves, structures, strict=True):
            tower.joins.append(([], []))
            copies = iter([_copied(tower, *pair) for pair in zip(local, wholes, strict=True)])
            answers.append(keras.tree.map_structure(lambda leaf: None if leaf is None else next(copies), structure))  # noqa: B023
        return answers

    def merged(self, values: Sequence[tuple[Merge, Sequence[tf.Tensor]]]) -> list:
        """Merges values, over which there are a way to merge them and the towers' tensors.

        Joined rows have what Keras attached to the towers'.
        """
        if self.is_alone:
            return [of_towers[0] for _, of_towers in values]
        of_rows = [(i, of_towers) for i, (way, of_towers) in enumerate(values) if way is Merge.ROWS]
        attached = [
            (i, name, [compat.attached(tensor)[name] for tensor in of_towers])
            for i, of_towers in of_rows
            for name in compat.attached(of_towers[0])
        ]
        with tf.device(self.device):
            local = [self._local(*each) for each in [*values, *((Merge.ROWS, each) for *_, each in attached)]]
            wholes = self.exchange(local)
        for (i, name, _), whole in zip(attached, wholes[len(values) :], strict=True):
            compat.attach(wholes[i], {name: whole})
        return wholes[: len(values)]

    def _local(self, way: Merge, values: Sequence[tf.Tensor]) -> tuple[Merge, tf.Tensor]:
        """Returns the merged values of this process's towers, and the way to merge them with others'."""
        if way is Merge.ROWS:
            local = self.rows(values)
            return way, tf.sparse.concat(0, local) if isinstance(local[0], tf.SparseTensor) else tf.concat(local, 0)
        if way is Merge.CHIEFS:
            return way, values[0]
        towers = [tower.part for tower in self.towers]
        if way is Merge.MEAN:
            return Merge.SUM, tf.add_n([tf.cast(p.share, v.dtype) * v for p, v in zip(towers, values, strict=True)])
        return way, tf.add_n([tf.where(p.examples > 0, v, 0) for p, v in zip(towers, values, strict=True)])

    def update_metrics(self) -> None:
        """Does the updates of metrics that all towers asked for, each once: of all rows, of the means of floating-point
        scalars, and of the sums of integers."""
        calls = list(zip(*(tower.updates for tower in self.towers), strict=True))
        flat = [[keras.tree.flatten(arguments) for _, *arguments in call] for call in calls]
        leaves = [values for each in flat for values in zip(*each, strict=True) if tf.is_tensor(values[0])]
        wholes = iter(self.merged([(_way(values[0]), values) for values in leaves]))
        for ((metric, *arguments), *_), of_towers in zip(calls, flat, strict=True):
            merged = [next(wholes) if tf.is_tensor(leaf) else leaf for leaf in of_towers[0]]
            args, kwargs = keras.tree.pack_sequence_as(arguments, merged)
            metric.update_state(*args, **kwargs)

    def assign(self) -> None:
        """Assigns what layers assigned in the towers: the mean over examples to floating-point variables such as moving
        averages, the first tower's value to others and to what is the same in all of them.

        Raises:
          ConfigError: a `tower_step` assigned to something else than layers do.
        """
        averages, same = compat.assigned_by_layers(self.model)
        values = []
        for key, (variable, value) in self.towers[0].assigned.items():
            is_known = key in averages or key in same or compat.is_seed_state(variable)
            is_mean = key in averages or not is_known and value.dtype.is_floating
            if not is_known:
                self._note_unknown(variable, is_mean)
            values.append((Merge.MEAN if is_mean else Merge.CHIEFS, [tower.assigned[key][1] for tower in self.towers]))
        for (variable, _), value in zip(self.towers[0].assigned.values(), self.merged(values), strict=True):
            variable.assign(value)

    def _note_unknown(self, variable: keras.Variable, is_mean: bool) -> None:
        if self._is_own_step:
            raise errors.ConfigError(
                f"{type(self.model).__name__}.tower_step assigns to {variable.path}, which every tower would do. Yield "
                "steps.Once(function) with a function that assigns, of joined tensors where it needs the whole batch; "
                "a metric must be an attribute of the model."
            )
        if not self.is_alone and id(variable) not in _noticed:
            _noticed[id(variable)] = variable
            value = "the mean of what the towers assign, each" if is_mean else "what the first tower assigns,"
            console.notice(f"{variable.path} gets {value} for its part of the batch: on one device it would differ.")

    def logs(self, returned: Sequence[Any]) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Merges what the towers' own steps returned, once metrics are up to date.

        Returns:
          {name: scalar} of metrics, up to this step; and of others, the means over this batch's examples.

        Raises:
          ConfigError: they returned something else than scalars.
        """
        results, means = {}, {}
        metrics = {id(value): (metric, part) for value, metric, part in self.towers[0].results}
        flat = [self._report(each) for each in returned]
        for name, value in flat[0].items():
            if id(value) in metrics:
                metric, part = metrics[id(value)]
                results[name] = metric.result() if part is None else metric.result()[part]
                continue
            values = [tf.convert_to_tensor(each[name]) for each in flat]
            if values[0].shape.rank != 0:
                raise errors.ConfigError(
                    f"{type(self.model).__name__}.tower_step returns {name!r} with shape {values[0].shape}; give a "
                    "scalar: its mean over the tower's examples."
                )
            is_mean = values[0].dtype.is_floating
            means[name] = Merge.MEAN, values if is_mean else [tf.cast(v, keras.config.floatx()) for v in values]
        return results, dict(zip(means, self.merged(list(means.values())), strict=True))

    def _report(self, returned: Any) -> dict:
        """Returns a step's report, with the results of several metrics in one beside the others."""
        if not isinstance(returned, dict) or not returned:
            raise errors.ConfigError(
                f"{type(self.model).__name__}.tower_step returns "
                f"{returned if returned == {} else type(returned).__name__}; "
                'give a dict of scalars to report, such as {"loss": loss}.'
            )
        flat = {}
        for name, value in returned.items():
            flat |= value if isinstance(value, dict) else {name: value}
        return flat


def _copied(tower: Tower, local: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Returns a tower's copy of joined rows and of what Keras attached to them."""
    copy, of_local = tower.joined(local, whole), compat.attached(local)
    if copy is not whole:
        compat.attach(copy, {name: tower.joined(of_local[name], each) for name, each in compat.attached(whole).items()})
    return copy


def _way(value: tf.Tensor) -> Merge:
    if value.shape.rank != 0:
        return Merge.ROWS
    return Merge.MEAN if value.dtype.is_floating else Merge.SUM
