"""Merges of the towers' results besides outputs: losses that layers add, and values that they assign.

Each tower has them for its own examples. Means over examples make the mean of the whole batch when weighted by the
towers' shares of it, sums make its sum when added. A trial finds which of them a layer computes: it calls the model on
a few made-up examples, all at once and in two parts.
"""

import dataclasses
import re
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat

_PARTS = (slice(0, 2), slice(2, 5))  # of the five examples; two is the least that has a variance
_ALL = slice(0, 5)
_POWERS = (0, 1, -1)  # mean, sum, mean over their number; the last one is a custom activity regularizer's
_NEITHER = 2
_TOLERANCE = 1e-4  # relative; sums and means differ by a factor


@dataclasses.dataclass(frozen=True)
class Growth:
    """The powers of the number of examples with which results grow: 0 for a mean, 1 for a sum.

    Attributes:
      losses: over calls of add_loss; None if it added nothing but zeros.
      layers: over calls of add_loss, the name of the layer.
      variables: {index in the model's variables: power} of assigned ones.
    """

    losses: tuple[int | None, ...] = ()
    layers: tuple[str, ...] = ()
    variables: dict[int, int] = dataclasses.field(default_factory=dict)


def weights(shares: Sequence[tf.Tensor], power: int) -> list[tf.Tensor]:
    """Returns the towers' weights: the result of the batch is the sum of the towers' results times these.

    Args:
      shares: the towers' shares of the batch, which sum to 1; 0 for a tower without examples.
      power: of the result's growth.
    """
    # With m the mean, the batch's m n^p is the sum over towers of (n_i / n) m_i n^p = share^(1 - p) (m_i n_i^p).
    return [tf.where(share > 0, share ** (1 - power), 0) for share in shares]


def find(model: keras.Model, variables: list[keras.Variable], x, training: bool) -> Growth:
    """Tries a model on a few examples.

    Args:
      model: a model that was built.
      variables: those that its layers may assign to, including the states of metrics.
      x: a batch, for its dtypes and shapes.
      training: as for the model's call.

    Raises:
      ConfigError: a layer adds a loss, or updates a metric, that the towers' parts do not determine.
    """
    for strength in (0.5, 0.01):
        with tf.init_scope():  # eager, also while Keras traces the step
            trial = _try(model, variables, x, training, strength)
        if trial.is_finite:
            break
    powers = [trial.power(series) for series in trial.losses]
    for layer, power in zip(trial.layers, powers, strict=True):
        if power == _NEITHER:
            raise errors.ConfigError(
                f"multi_gpu_model: the loss that the layer {layer!r} gives to add_loss is neither a sum nor a mean "
                "over examples, or draws random numbers without keras.random, so that towers cannot compute it in "
                "parts. Make the tensor that it is computed from an output of the model, and the loss one for "
                "compile(loss=...), which gets the whole batch; or use gpus=1."
            )
    return Growth(tuple(powers), trial.layers, _of_variables(trial, model, variables))


def _of_variables(trial: "_Trial", model, variables) -> dict[int, int]:
    powers = {i: trial.power(series) or 0 for i, series in trial.assigned.items()}
    metrics = {id(variable): metric.name for metric in compat.layer_metrics(model) for variable in metric.variables}
    for i in [i for i, power in powers.items() if power == _NEITHER]:
        if id(variables[i]) in metrics:
            raise errors.ConfigError(
                f"multi_gpu_model: the metric {metrics[id(variables[i])]!r}, which a layer updates, is neither of sums "
                "nor of means over examples. Make its tensor an output of the model and give the metric to "
                "compile(metrics=...), which gets the whole batch; or use gpus=1."
            )
        console.notice(
            f"{variables[i].path} gets the mean of what the towers assign, each for its part of the batch: on one "
            "device it would differ."
        )
        powers[i] = 0
    return powers


def _try(model, variables, x, training, strength) -> "_Trial":
    try:
        return _Trial(model, variables, x, training, strength)
    except errors.ConfigError:
        raise
    except (ValueError, TypeError, tf.errors.OpError) as error:
        lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line]
        reason = next((line for line in lines if "Exception encountered" not in line), type(error).__name__)
        raise errors.ConfigError(
            "multi_gpu_model calls a model whose layers add losses, or assign to variables, on five made-up examples, "
            f"to tell sums from means. This one fails on them: {reason} Move its losses and metrics to compile(), or "
            "use gpus=1."
        ) from error


class _Trial:
    """Results of a model for five examples, for two of them and for the other three, each with two sets of weights.

    Attributes:
      layers: over calls of add_loss, the layer's name.
      losses: over calls of add_loss, arrays [3, 2].
      assigned: {index of a variable: array [3, 2, ...], the changes of its value}.
    """

    def __init__(self, model, variables, x, training, strength):
        rng = np.random.default_rng(0)
        examples = keras.tree.map_structure(lambda leaf: leaf if leaf is None else _examples(leaf, rng), x)
        two_sets = [_changed(model.variables, rng, strength) for _ in range(2)]
        results = [
            [_results(model, variables, rows(examples, part), training, copies) for copies in two_sets]
            for part in (*_PARTS, _ALL)
        ]
        [first, *others] = [result for row in results for result in row]
        if any(result[0] != first[0] or result[2].keys() != first[2].keys() for result in others):
            raise errors.ConfigError(
                "multi_gpu_model: the model gives other losses to add_loss, or assigns other variables, for five "
                "examples than for two or three, so that towers cannot compute them in parts. Use gpus=1."
            )
        self.layers = tuple(first[0])
        self.losses = [np.array([[r[1][k] for r in row] for row in results]) for k in range(len(first[1]))]
        self.assigned = {i: np.array([[r[2][i] for r in row] for row in results]) for i in first[2]}

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(series).all() for series in (*self.losses, *self.assigned.values()))

    def power(self, series: np.ndarray) -> int | None:
        """Returns the power with which a result grows, _NEITHER, or None if it is always 0."""
        if not series.any():
            return None
        eps = 1e-3 if series.dtype == np.float16 else np.finfo(np.float32).eps
        series = series.astype(np.float64)
        series = np.stack([*np.moveaxis(series, 1, 0), series[:, 1] - series[:, 0]])  # a constant would hide the rest
        for power in _POWERS:
            shares = [(part.stop - part.start) / (_ALL.stop - _ALL.start) for part in _PARTS]
            expected = sum(share ** (1 - power) * series[:, i] for i, share in enumerate(shares))
            bounds = [_TOLERANCE * np.abs(s).max() + 20 * eps * np.abs(series).max() for s in series]
            if all(np.abs(e - s[-1]).max() <= b for e, s, b in zip(expected, series, bounds, strict=True)):
                return power
        return _NEITHER


def _results(model, variables, x, training, copies) -> tuple[list[str], list[np.ndarray], dict[int, np.ndarray]]:
    """Returns the names of the layers that add losses, those losses, and the changes of assigned variables."""
    names, add_loss = [], keras.Layer.add_loss

    def named(layer, loss):
        names.extend([layer.name] * len(keras.tree.flatten(loss)))
        add_loss(layer, loss)

    with (
        compat.replaced(keras.Layer, "add_loss", named),
        compat.draws_alike(),
        compat.moving_statistics(),
        keras.StatelessScope(copies, collect_losses=True) as scope,
    ):
        model(x, training=training)
    before = {id(variable): value for variable, value in copies}
    assigned = {}
    for i, variable in enumerate(variables):
        old, new = before.get(id(variable)), scope.get_current_value(variable)
        if new is not None and new is not old and not compat.is_seed_state(variable):
            assigned[i] = np.asarray(new) - np.asarray(variable.value if old is None else old)
    return names, [np.sum(np.asarray(loss)) for loss in scope.losses], assigned


def _examples(leaf: tf.Tensor, rng: np.random.Generator) -> tf.Tensor:
    """Makes up five examples for one of the model's inputs: small positive numbers, which every layer accepts."""
    unknown = 64 if len(leaf.shape) > 3 else 8  # images must be large enough to be pooled
    shape = [_ALL.stop, *(size or unknown for size in leaf.shape[1:])]
    if leaf.dtype.is_floating:
        return tf.constant(rng.random(shape), leaf.dtype)
    ones = rng.random(shape) < 0.7
    return tf.constant(np.where(ones, "b", "a")) if leaf.dtype == tf.string else tf.cast(ones, leaf.dtype)


def _changed(variables, rng: np.random.Generator, strength: float) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns copies of variables, moved away from values that hide differences, such as 0."""
    copies = []
    for variable in variables:
        value = tf.identity(variable.value)
        if value.dtype.is_floating:
            change = tf.constant(rng.uniform(-strength, strength, value.shape), value.dtype)
            value = tf.where(value == 0, change / 5, value * (1 + change))
        copies.append((variable, value))
    return copies


def rows(x, part: slice):
    """Returns some examples of a batch; x is a tensor [batch, ...] or a structure of them."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], x)
