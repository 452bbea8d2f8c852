"""From the towers' tensors to the batch's: joined rows, means over examples, metrics, assigned variables."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps.exchange import Exchange, Kind
from tower_train.fronts.own_steps.tower import Tower


class Way(enum.Enum):
    """Ways in which the values of towers become that of the batch."""

    ROWS = enum.auto()  # joined
    MEAN = enum.auto()  # over examples
    SUM = enum.auto()  # over towers that have examples
    FIRST = enum.auto()  # the first tower's


def rows(towers: Sequence[Tower], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the towers' tensors, each [rows, ...], less the rows of towers without examples."""
    if towers[0].part.count == 1:
        return list(tensors)
    return [t[: tf.where(tower.part.examples > 0, tf.shape(t)[0], 0)] for tower, t in zip(towers, tensors, strict=True)]


def joined(towers: Sequence[Tower], tensors: Sequence[Sequence[tf.Tensor]], exchange: Exchange) -> list[tf.Tensor]:
    """Joins the rows of all towers, and Keras' masks of them.

    Args:
      towers: of this process.
      tensors: over what is joined, over towers.
      exchange: with other processes.
    """
    return merged(towers, [(Way.ROWS, each) for each in tensors], exchange)


def merged(towers: Sequence[Tower], asked: Sequence[tuple[Way, Sequence[tf.Tensor]]], exchange: Exchange) -> list:
    """Merges the values of towers, over what is asked for. Arguments as for `joined`, with the way to merge them."""
    if towers[0].part.count == 1:
        return [values[0] for _, values in asked]
    masks = [[compat.mask_of(value) for value in values] for _, values in asked]
    masked = [i for i, (way, _) in enumerate(asked) if way is Way.ROWS and None not in masks[i]]
    found = exchange([_own(towers, *each) for each in [*asked, *((Way.ROWS, masks[i]) for i in masked)]])
    for i, mask in zip(masked, found[len(asked) :], strict=True):
        compat.set_mask(found[i], mask)
    return found[: len(asked)]


def _own(towers: Sequence[Tower], way: Way, values: Sequence[tf.Tensor]) -> tuple[Kind, tf.Tensor]:
    """The merged values of this process's towers, and what they are among those of others."""
    if way is Way.ROWS:
        return Kind.ROWS, tf.concat(rows(towers, values), axis=0)
    if way is Way.FIRST:
        return Kind.CHIEFS, values[0]
    if way is Way.MEAN:
        return Kind.SUM, tf.add_n([tf.cast(t.part.share, v.dtype) * v for t, v in zip(towers, values, strict=True)])
    # Of towers that have examples.
    return Kind.SUM, tf.add_n([tf.where(t.part.share > 0, v, 0) for t, v in zip(towers, values, strict=True)])


def update_metrics(towers: Sequence[Tower], exchange: Exchange) -> None:
    """Does the updates of metrics that all towers asked for, each once: of all rows, of the means of floating-point
    scalars, and of the sums of integers."""
    calls = list(zip(*(tower.updates for tower in towers), strict=True))
    flat = [[keras.tree.flatten((update.args, update.kwargs)) for update in call] for call in calls]
    leaves = [values for each in flat for values in zip(*each, strict=True)]
    asked = [(_way(values[0]), values) for values in leaves if tf.is_tensor(values[0])]
    whole = iter(merged(towers, asked, exchange))
    for call, of_towers in zip(calls, flat, strict=True):
        found = [next(whole) if tf.is_tensor(leaf) else leaf for leaf in of_towers[0]]
        args, kwargs = keras.tree.pack_sequence_as((call[0].args, call[0].kwargs), found)
        call[0].metric.update_state(*args, **kwargs)


def _way(value: tf.Tensor) -> Way:
    if value.shape.rank:
        return Way.ROWS
    return Way.MEAN if value.dtype.is_floating else Way.SUM


def assign(model: keras.Model, towers: Sequence[Tower], exchange: Exchange) -> None:
    """Assigns what layers assigned in the towers: the mean over examples to moving averages of batch normalisation,
    the first tower's value to what is the same in all of them.

    Raises:
      ConfigError: `tower_step` assigned to something else.
    """
    averages = {id(variable) for variable in compat.moving_statistics_of(model)}
    normalized = [layer for layer in compat.sublayers(model) if isinstance(layer, keras.layers.SpectralNormalization)]
    same = {id(variable) for layer in normalized for variable in (layer.kernel, layer.vector_u)}
    asked = []
    for key, (variable, _) in towers[0].assigned.items():
        if key not in averages and key not in same and not compat.is_seed_state(variable):
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step assigns to {variable.path}, which every tower would do. Yield "
                "steps.Once(function) with a function that assigns, of joined tensors where it needs the whole batch; "
                "a metric must be an attribute of the model."
            )
        way = Way.MEAN if key in averages else Way.FIRST
        asked.append((way, [tower.assigned[key][1] for tower in towers]))
    values = merged(towers, asked, exchange)
    for (variable, _), value in zip(towers[0].assigned.values(), values, strict=True):
        variable.assign(value)


class Logs(NamedTuple):
    """The report of a step.

    Attributes:
      results: {name: scalar} of metrics, up to this step.
      means: {name: scalar} of others, over this batch's examples.
    """

    results: dict[str, tf.Tensor]
    means: dict[str, tf.Tensor]


def logs(model: keras.Model, towers: Sequence[Tower], returned: Sequence[Any], exchange: Exchange) -> Logs:
    """Merges what the towers' steps returned, once metrics are up to date.

    Raises:
      ConfigError: they returned something else than scalars.
    """
    results, means = {}, {}
    metrics = {id(value): (metric, part) for value, metric, part in towers[0].results}
    flat = [_dictionary(model, each) for each in returned]
    for name, value in flat[0].items():
        if id(value) in metrics:
            metric, part = metrics[id(value)]
            results[name] = metric.result() if part is None else metric.result()[part]
            continue
        values = [tf.convert_to_tensor(each[name]) for each in flat]
        if values[0].shape.rank != 0:
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step returns {name!r} with shape {values[0].shape}; give a scalar: its "
                "mean over the tower's examples."
            )
        means[name] = Way.MEAN, [_floating(value) for value in values]
    return Logs(results, dict(zip(means, merged(towers, list(means.values()), exchange), strict=True)))


def _dictionary(model: keras.Model, returned: Any) -> dict:
    """Returns a step's report, with the results of several metrics in one beside the others."""
    if not isinstance(returned, dict) or not returned:
        raise errors.ConfigError(
            f"{type(model).__name__}.tower_step returns {returned if returned == {} else type(returned).__name__}; "
            'give a dict of scalars to report, such as {"loss": loss}.'
        )
    flat = {}
    for name, value in returned.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _floating(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
