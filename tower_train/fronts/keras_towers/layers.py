"""Outputs and added losses of a Keras model's layers in a step: on one device and in towers."""

import collections
import contextlib
import inspect
import itertools
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.keras_building import output_names
from tower_train.proof.operations import MEAN, SUM, relation

# {layer: which of the losses that it adds in a step are sums over examples}, once that is known
_SUMS: weakref.WeakKeyDictionary[keras.Layer, set[int]] = weakref.WeakKeyDictionary()


class Seen(NamedTuple):
    """A tensor that a layer computed: an output, or a loss that it adds."""

    layer: keras.Layer
    tensor: tf.Tensor
    loss: int | None = None  # how many losses the layer added before this one in the step; None for an output
    output: str = ""  # its name, if it is one of a model's

    def __str__(self) -> str:
        if self.output:
            return f"{self.layer.path}: its output {self.output}, whose first axis must be the batch"
        function = type(self.layer).call
        code = getattr(inspect.unwrap(function), "__code__", None)
        is_kerass = type(self.layer).__module__.startswith("keras.")
        where = "" if code is None or is_kerass else f", {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        what = (
            "its outputs"
            if self.loss is None
            else "the loss that it adds, which is neither a mean nor a sum over examples (make the tensor an output of "
            "the model and the loss one for `compile`)"
        )
        return f"{self.layer.path} ({type(self.layer).__name__}{where}): {what}"


def _added_by(add: Callable):
    """Lets layers in this thread within a block add add(layer, number of the loss among the layer's, loss); a context
    manager."""
    numbers = collections.defaultdict(itertools.count)

    def add_loss(original, layer, loss):
        return original(layer, add(layer, next(numbers[id(layer)]), loss))

    return compat.replaced_here(keras.Layer, add_loss=add_loss)


def _seen(step: Callable[[], None]) -> list[Seen]:
    """Does a step and returns what layers compute in it, in their order; not in loops and functions."""
    seen, graph = [], tf.compat.v1.get_default_graph()

    def note(layer: keras.Layer, value, *more) -> None:
        for leaf in tf.nest.flatten(value, expand_composites=True):
            if tf.is_tensor(leaf) and leaf.dtype.is_floating and getattr(leaf, "graph", None) is graph:
                seen.append(Seen(layer, leaf, *more))

    def call(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        if isinstance(layer, keras.Model):
            for name, output in zip(output_names(layer, outputs), keras.tree.flatten(outputs), strict=False):
                note(layer, output, None, name)
        else:
            note(layer, outputs)
        return outputs

    def add(layer, number, loss):
        note(layer, loss, number)
        return loss

    with compat.replaced_here(keras.Layer, __call__=call), _added_by(add):
        step()
    return seen


def differing_layer(alone: keras.Model, several, batch, tolerance: float, reset: Callable[[], None]) -> Seen | None:
    """Does a step on one device and in towers; returns the first thing that layers in towers compute otherwise.

    Args:
      alone, several: a model, and a TowerModel of it.
      batch: of the step.
      tolerance: relative, of what counts as equal.
      reset: gives variables their first values, before either.

    From then on it is known which of the losses that layers add are sums over examples.
    """

    def computed(steps: Callable[[], list[list[Seen]]]) -> tuple[list[list[Seen]], list[list[tf.Tensor]]]:
        seen: list[list[Seen]] = []

        def run() -> list[list[tf.Tensor]]:
            seen[:] = steps()
            return [[each.tensor for each in of_tower] for of_tower in seen]

        reset()
        return seen, tf.function(run, autograph=False)()

    [whole], [values] = computed(lambda: [_seen(lambda: alone.train_step(batch))])
    _, by_tower = computed(lambda: several.train_around(batch, _seen))
    first = None
    for seen, value, *parts in zip(whole, values, *by_tower, strict=False):
        axes = range(1) if seen.output else None  # a model's outputs are joined by their first axis
        found = relation(np.asarray(value), list(map(np.asarray, parts)), tolerance, axes)
        if seen.loss is not None and found == SUM:
            _SUMS.setdefault(seen.layer, set()).add(seen.loss)
        elif first is None and (found is None or (seen.loss is not None and found not in ("same", MEAN))):
            first = seen
    return first


def sums_divided(share: tf.Tensor):
    """Lets layers in a tower within a block add losses that are sums over examples such that the mean over towers,
    weighted by their share of the examples, is the sum over all; a context manager."""

    def add(layer, number, loss):
        if number in _SUMS.get(layer, ()):
            loss = keras.tree.map_structure(lambda each: tf.math.divide_no_nan(each, tf.cast(share, each.dtype)), loss)
        return loss

    return _added_by(add) if _SUMS else contextlib.nullcontext()
