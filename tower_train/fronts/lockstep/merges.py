"""From the towers' tensors to the batch's: joined rows, means over examples, metrics, assigned variables, reports."""

import enum
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.exchange import Exchange, Kind
from tower_train.fronts.lockstep.tower import Tower

_noticed = weakref.WeakValueDictionary()  # {id: variable} of those that a notice has named


class Way(enum.Enum):
    """Ways in which the values of towers become that of the batch."""

    ROWS = enum.auto()  # joined
    MEAN = enum.auto()  # over examples
    SUM = enum.auto()  # over towers that have examples
    FIRST = enum.auto()  # the first tower's


class Logs(NamedTuple):
    """The report of a step.

    Attributes:
      results: {name: scalar} of metrics, up to this step.
      means: {name: scalar} of others, over this batch's examples.
    """

    results: dict[str, tf.Tensor]
    means: dict[str, tf.Tensor]


class Meeting:
    """The towers of a step where they meet.

    Args:
      model: whose step it is.
      towers: of this process.
      exchange: with other processes.
      device: where rows are joined.
      has_own_step: whether the program wrote the step, so that its assignments are refused.
    """

    def __init__(
        self, model: keras.Model, towers: Sequence[Tower], exchange: Exchange, device: str, has_own_step: bool
    ):
        self.model, self.towers, self.exchange, self.device = model, towers, exchange, device
        self._has_own_step = has_own_step
        self._joined: dict[tuple[int, ...], tuple] = {}  # {ids of the towers' tensors: (those, their rows joined)}

    @property
    def is_alone(self) -> bool:
        """Whether there is one tower in all."""
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
        leaves = [[leaf for leaf in keras.tree.flatten(each) if leaf is not None] for each in structures]
        leaves = [[leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf) for leaf in each] for each in leaves]
        if any(leaf.shape.rank == 0 for leaf in leaves[0]):
            raise errors.ConfigError(
                "tower_step yields a Join of a scalar; join tensors that have a row for each example."
            )
        with tf.device(self.device):
            wholes = self.merged([(Way.ROWS, values) for values in zip(*leaves, strict=True)])
        answers = []
        for tower, local, structure in zip(self.towers, leaves, structures, strict=True):
            tower.joins.append(([], []))
            copies = iter([self._copied(tower, *pair) for pair in zip(local, wholes, strict=True)])
            answers.append(keras.tree.map_structure(lambda leaf: None if leaf is None else next(copies), structure))  # noqa: B023
        return answers

    def _copied(self, tower: Tower, local: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
        """Returns a tower's copy of joined rows and of what Keras attached to them."""
        copy, of_local = tower.joined(local, whole), compat.attached(local)
        if copy is whole:
            return whole
        compat.attach(copy, {name: tower.joined(of_local[name], each) for name, each in compat.attached(whole).items()})
        return copy

    def merged(self, values: Sequence[tuple[Way, Sequence[tf.Tensor]]]) -> list:
        """Merges values, over which there are a way to merge them and the towers' tensors."""
        if self.is_alone:
            return [of_towers[0] for _, of_towers in values]
        missing, attached = {}, {}
        for way, of_towers in values:
            key = (way, *map(id, of_towers))
            if key not in self._joined and key not in missing:
                missing[key] = way, of_towers
                by_tower = [compat.attached(tensor) for tensor in of_towers] if way is Way.ROWS else [{}]
                names = [name for name in by_tower[0] if all(name in each for each in by_tower)]
                attached |= {(key, name): (Way.ROWS, [each[name] for each in by_tower]) for name in names}
        wholes = iter(self.exchange([self._local(*each) for each in [*missing.values(), *attached.values()]]))
        for key, (_, of_towers) in missing.items():
            self._joined[key] = of_towers, next(wholes)
        for (key, name), whole in zip(attached, wholes, strict=True):
            compat.attach(self._joined[key][1], {name: whole})
        return [self._joined[(way, *map(id, of_towers))][1] for way, of_towers in values]

    def _local(self, way: Way, values: Sequence[tf.Tensor]) -> tuple[Kind, tf.Tensor]:
        """Returns the merged values of this process's towers, and what they are among those of others."""
        if way is Way.ROWS:
            local = self.rows(values)
            concat = tf.sparse.concat if isinstance(local[0], tf.SparseTensor) else lambda _, each: tf.concat(each, 0)
            return Kind.ROWS, concat(0, local)
        if way is Way.FIRST:
            return Kind.CHIEFS, values[0]
        pairs = zip(self.towers, values, strict=True)
        if way is Way.MEAN:
            return Kind.SUM, tf.add_n([tf.cast(tower.part.share, v.dtype) * v for tower, v in pairs])
        return Kind.SUM, tf.add_n([tf.where(tower.part.examples > 0, v, 0) for tower, v in pairs])

    def update_metrics(self) -> None:
        """Does the updates of metrics that all towers asked for, each once: of all rows, of the means of floating-point
        scalars, and of the sums of integers."""
        calls = list(zip(*(tower.updates for tower in self.towers), strict=True))
        flat = [[keras.tree.flatten((update.args, update.kwargs)) for update in call] for call in calls]
        leaves = [values for each in flat for values in zip(*each, strict=True)]
        wholes = iter(self.merged([(_way(values[0]), values) for values in leaves if tf.is_tensor(values[0])]))
        for call, of_towers in zip(calls, flat, strict=True):
            merged = [next(wholes) if tf.is_tensor(leaf) else leaf for leaf in of_towers[0]]
            args, kwargs = keras.tree.pack_sequence_as((call[0].args, call[0].kwargs), merged)
            call[0].metric.update_state(*args, **kwargs)

    def assign(self) -> None:
        """Assigns what layers assigned in the towers: the mean over examples to floating-point variables such as moving
        averages, the first tower's value to others and to what is the same in all of them.

        Raises:
          ConfigError: a `tower_step` assigned to something else than layers do.
        """
        averages = {id(variable) for variable in compat.moving_statistics_of(self.model)}
        same = {id(variable) for variable in compat.spectral_state_of(self.model)}
        values = []
        for key, (variable, value) in self.towers[0].assigned.items():
            is_known = key in averages or key in same or compat.is_seed_state(variable)
            if not is_known and self._has_own_step:
                raise errors.ConfigError(
                    f"{type(self.model).__name__}.tower_step assigns to {variable.path}, which every tower would do. "
                    "Yield steps.Once(function) with a function that assigns, of joined tensors where it needs the "
                    "whole batch; a metric must be an attribute of the model."
                )
            is_mean = key in averages or not is_known and value.dtype.is_floating
            if not is_known and not self.is_alone and id(variable) not in _noticed:
                _noticed[id(variable)] = variable
                value = "the mean of what the towers assign, each" if is_mean else "what the first tower assigns,"
                console.notice(
                    f"{variable.path} gets {value} for its part of the batch: on one device it would differ."
                )
            values.append((Way.MEAN if is_mean else Way.FIRST, [tower.assigned[key][1] for tower in self.towers]))
        for (variable, _), value in zip(self.towers[0].assigned.values(), self.merged(values), strict=True):
            variable.assign(value)

    def logs(self, returned: Sequence[Any]) -> Logs:
        """Merges what the towers' steps returned, once metrics are up to date.

        Raises:
          ConfigError: they returned something else than scalars.
        """
        results, means = {}, {}
        metrics = {id(value): (metric, part) for value, metric, part in self.towers[0].results}
        flat = [self._dictionary(each) for each in returned]
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
            means[name] = Way.MEAN, [_floating(value) for value in values]
        return Logs(results, dict(zip(means, self.merged(list(means.values())), strict=True)))

    def _dictionary(self, returned: Any) -> dict:
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


def _way(value: tf.Tensor) -> Way:
    if value.shape.rank != 0:
        return Way.ROWS
    return Way.MEAN if value.dtype.is_floating else Way.SUM


def _floating(value: tf.Tensor) -> tf.Tensor:
    """Returns a number as a floating-point one."""
    return value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
