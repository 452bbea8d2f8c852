"""From the towers' tensors to the batch's: joined rows, means over examples, metrics, assigned variables."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps.tower import Tower


def rows(towers: Sequence[Tower], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the towers' tensors, each [rows, ...], without the rows of towers without examples."""
    if len(towers) == 1:
        return list(tensors)
    return [t[: tf.where(tower.part.examples > 0, tf.shape(t)[0], 0)] for tower, t in zip(towers, tensors, strict=True)]


def joined(towers: Sequence[Tower], tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins the towers' rows, and Keras' masks of them."""
    if len(towers) == 1:
        return tensors[0]
    whole, masks = tf.concat(rows(towers, tensors), axis=0), [compat.mask_of(tensor) for tensor in tensors]
    if None not in masks:
        compat.set_mask(whole, tf.concat(rows(towers, masks), axis=0))
    return whole


def mean(towers: Sequence[Tower], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the mean of the towers' values, weighted by their examples."""
    if len(towers) == 1:
        return values[0]
    return tf.add_n([tf.cast(t.part.share, v.dtype) * v for t, v in zip(towers, values, strict=True)])


def update_metrics(towers: Sequence[Tower]) -> None:
    """Does the metric updates that all towers requested, each once: of all rows, of the means of floating-point
    scalars, and of the sums of integers."""

    def whole(*values):
        if not tf.is_tensor(values[0]):
            return values[0]
        if values[0].shape.rank:
            return joined(towers, values)
        return mean(towers, values) if values[0].dtype.is_floating else _count(towers, values)

    for updates in zip(*(tower.updates for tower in towers), strict=True):
        each = [(update.args, update.kwargs) for update in updates]
        args, kwargs = keras.tree.map_structure(whole, *each)
        updates[0].metric.update_state(*args, **kwargs)


def assign(model: keras.Model, towers: Sequence[Tower]) -> None:
    """Assigns the layers' assignments in towers: the mean over examples to moving averages of batch normalisation, the
    first tower's value to what is the same in all. Raises ConfigError if `tower_step` assigned to something else."""
    averages = {id(variable) for variable in compat.moving_statistics_of(model)}
    normalized = [layer for layer in compat.sublayers(model) if isinstance(layer, keras.layers.SpectralNormalization)]
    same = {id(variable) for layer in normalized for variable in (layer.kernel, layer.vector_u)}
    for key, (variable, value) in towers[0].assigned.items():
        if key in averages:
            variable.assign(mean(towers, [tower.assigned[key][1] for tower in towers]))
        elif key in same or compat.is_seed_state(variable):
            variable.assign(value)
        else:
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step assigns to {variable.path}, which every tower would do. Yield "
                "steps.Once(function) with a function that assigns, of joined tensors where it needs the whole batch; "
                "a metric must be an attribute of the model."
            )


class Logs(NamedTuple):
    """The report of a step.

    Attributes:
      results: {name: scalar} of metrics, up to this step.
      means: {name: scalar} of others, over this batch's examples.
    """

    results: dict[str, tf.Tensor]
    means: dict[str, tf.Tensor]


def logs(model: keras.Model, towers: Sequence[Tower], returned: Sequence[Any]) -> Logs:
    """Merges the results of the towers' steps, once metrics are up to date; ConfigError if they are no scalars."""
    merged = Logs({}, {})
    metrics = {id(value): (metric, part) for value, metric, part in towers[0].results}
    flat = [_dictionary(model, each) for each in returned]
    for name, value in flat[0].items():
        if id(value) in metrics:
            metric, part = metrics[id(value)]
            merged.results[name] = metric.result() if part is None else metric.result()[part]
            continue
        values = [tf.convert_to_tensor(each[name]) for each in flat]
        if values[0].shape.rank != 0:
            raise errors.ConfigError(
                f"{type(model).__name__}.tower_step returns {name!r} with shape {values[0].shape}; give a scalar: its "
                "mean over the tower's examples."
            )
        merged.means[name] = mean(towers, [_floating(value) for value in values])
    return merged


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


def _count(towers: Sequence[Tower], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum over the towers that have examples."""
    return tf.add_n([tf.where(tower.part.share > 0, v, 0) for tower, v in zip(towers, values, strict=True)])


def _floating(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
