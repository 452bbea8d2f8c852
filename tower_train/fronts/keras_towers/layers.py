"""Outputs and added losses of a Keras model's layers in a step: on one device and in towers."""

import inspect
import os
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.keras_building import output_names
from tower_train.proof.operations import MEAN, relation


class Seen(NamedTuple):
    """A tensor that a layer computed: an output, or a loss that it adds."""

    layer: keras.Layer
    tensor: tf.Tensor
    is_loss: bool = False
    output: str = ""  # its name, if it is one of a model's

    def __str__(self) -> str:
        if self.output:
            return f"{self.layer.path}: its output {self.output}, whose first axis must be the batch"
        function = type(self.layer).call
        code = getattr(inspect.unwrap(function), "__code__", None)
        is_kerass = type(self.layer).__module__.startswith("keras.")
        where = "" if code is None or is_kerass else f", {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        what = (
            "the loss that it adds, which is no mean over examples (take the mean, or make the tensor an output of the "
            "model and the loss one for `compile`)"
            if self.is_loss
            else "its outputs"
        )
        return f"{self.layer.path} ({type(self.layer).__name__}{where}): {what}"


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
                note(layer, output, False, name)
        else:
            note(layer, outputs)
        return outputs

    def add_loss(original, layer, loss):
        note(layer, loss, True)
        return original(layer, loss)

    with compat.replaced_here(keras.Layer, __call__=call, add_loss=add_loss):
        step()
    return seen


def differing_layer(alone: keras.Model, several, batch, tolerance: float, reset: Callable[[], None]) -> Seen | None:
    """Does a step on one device and in towers; returns the first thing that layers in towers compute otherwise.

    Args:
      alone, several: a model, and a TowerModel of it.
      batch: of the step.
      tolerance: relative, of what counts as equal.
      reset: gives variables their first values, before either.
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
    for seen, value, *parts in zip(whole, values, *by_tower, strict=False):
        axes = range(1) if seen.output else None  # a model's outputs are joined by their first axis
        found = relation(np.asarray(value), list(map(np.asarray, parts)), tolerance, axes)
        if found is None or (seen.is_loss and found not in ("same", MEAN)):
            return seen
    return None
