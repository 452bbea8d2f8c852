"""From the towers' tensors to the batch's: joined rows, means over examples, metrics, assigned variables, reports."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.exchange import Exchange
from tower_train.fronts.lockstep.tower import Tower


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
        self.model, self.towers, self.exchange, self._device = model, towers, exchange, device
        self._is_own_step = is_own_step

    @property
    def is_alone(self) -> bool:
        """True if there is one tower in all."""
        return self.towers[0].part.count == 1

    def join(self, structures: Sequence) -> list:
        """Returns over towers, on their devices, the structures of joined tensors; gradients go to their rows."""
        if self.is_alone:
            return list(structures)
        leaves = [
            [parts.as_tensor(leaf) for leaf in keras.tree.flatten(each) if leaf is not None] for each in structures
        ]
        if any(leaf.shape.rank == 0 for leaf in leaves[0]):
            raise errors.ConfigError(
                "tower_step yields a Join of a scalar; join tensors that have a row for each example."
            )
        wholes, answers = [self.rows(values) for values in zip(*leaves, strict=True)], []
        for tower, structure in zip(self.towers, structures, strict=True):
            copies = iter([_copied(whole, tower.device) for whole in wholes])
            answers.append(keras.tree.map_structure(lambda leaf: None if leaf is None else next(copies), structure))  # noqa: B023
        return answers

    def rows(self, values: Sequence):
        """Joins the towers' rows, less those of towers without examples, and what Keras attached to them."""
        if self.is_alone:
            return values[0]
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

    def totals(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the means over examples of floating-point values, and the sums of others, over which there are those
        of the towers."""
        if self.is_alone:
            return [of_towers[0] for of_towers in values]
        with tf.device(self._device):
            return self.exchange.sum([self._local(of_towers) for of_towers in values])

    def firsts(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the values of the first of all towers; values: this process's first tower's."""
        with tf.device(self._device):
            return self.exchange.first(values)

    def _local(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        shares, is_mean = [tower.part.share for tower in self.towers], values[0].dtype.is_floating
        of_towers = zip(shares, values, strict=True)
        return tf.add_n([tf.cast(s if is_mean else tf.math.ceil(s), v.dtype) * v for s, v in of_towers])

    def update_metrics(self) -> None:
        """Does the updates of metrics that all towers asked for, each once: of all rows, and of scalars' totals."""
        calls = list(zip(*(tower.updates for tower in self.towers), strict=True))
        flat = [[keras.tree.flatten(arguments) for _, *arguments in call] for call in calls]
        leaves = [values for each in flat for values in zip(*each, strict=True) if tf.is_tensor(values[0])]
        totals = iter(self.totals([values for values in leaves if values[0].shape.rank == 0]))
        wholes = iter([next(totals) if values[0].shape.rank == 0 else self.rows(values) for values in leaves])
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
        assigned, means = self.towers[0].assigned, []
        for key, (variable, value) in assigned.items():
            is_known = key in averages or key in same or compat.is_seed_state(variable)
            if key in averages or not is_known and value.dtype.is_floating:
                means.append(key)
            if not is_known:
                self._note_unknown(variable, key in means)
        firsts = [key for key in assigned if key not in means]
        values = self.totals([[tower.assigned[key][1] for tower in self.towers] for key in means])
        values += self.firsts([assigned[key][1] for key in firsts])
        for key, value in zip([*means, *firsts], values, strict=True):
            assigned[key][0].assign(value)

    def _note_unknown(self, variable: keras.Variable, is_mean: bool) -> None:
        if self._is_own_step:
            raise errors.ConfigError(
                f"{type(self.model).__name__}.tower_step assigns to {variable.path}, which every tower would do. Yield "
                "steps.Once(function) with a function that assigns, of joined tensors where it needs the whole batch; "
                "a metric must be an attribute of the model."
            )
        if not self.is_alone:
            value = "the mean of what the towers assign, each" if is_mean else "what the first tower assigns,"
            text = f"{variable.path} gets {value} for its part of the batch: on one device it would differ."
            console.notice_once(variable, text)

    def logs(self, returned: Sequence[Any]) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Merges what the towers' own steps returned, once metrics are up to date.

        Returns:
          {name: scalar} of metrics, up to this step; and of others, the means over this batch's examples.

        Raises:
          ConfigError: they returned something else than scalars.
        """
        flat, of_metrics = [self._report(each) for each in returned], self.towers[0].results
        results = {name: of_metrics[id(v)][1]() for name, v in flat[0].items() if id(v) in of_metrics}
        means = {name: [tf.convert_to_tensor(each[name]) for each in flat] for name in flat[0] if name not in results}
        for name, values in means.items():
            if values[0].shape.rank != 0:
                raise errors.ConfigError(
                    f"{type(self.model).__name__}.tower_step returns {name!r} with shape {values[0].shape}; give a "
                    "scalar: its mean over the tower's examples."
                )
            if not values[0].dtype.is_floating:
                means[name] = [tf.cast(value, keras.config.floatx()) for value in values]
        return results, dict(zip(means, self.totals(list(means.values())), strict=True))

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


def _copied(whole, device: str):
    """Copies a joined tensor, and what Keras attached to it, to a device."""
    with tf.device(device):
        copy = tf.identity(whole)
    compat.attach(copy, {name: _copied(each, device) for name, each in compat.attached(whole).items()})
    return copy
