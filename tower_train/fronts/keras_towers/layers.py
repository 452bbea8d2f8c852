"""Outputs and added losses of a Keras model's layers in a step: on one device and in towers."""

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.keras_building import output_names
from tower_train.proof.operations import MEAN, SUM, relation

Key = tuple[int, int]  # of a loss that a layer adds: the layer's id, and how many it added before in the step


class Summed:
    """The losses that a model's layers add as sums over examples, once they are known. Keras would copy a mere set."""

    def __init__(self):
        self.keys: set[Key] = set()


class Seen(NamedTuple):
    """A tensor that a layer computed: an output, or a loss that it adds, which has a key."""

    layer: keras.Layer
    key: Key | None
    tensor: tf.Tensor
    output: str = ""  # its name, if it is one of a model's

    def __str__(self) -> str:
        if self.output:
            return f"{self.layer.path}: its output {self.output}, whose first axis must be the batch"
        function = type(self.layer).call
        code = getattr(inspect.unwrap(function), "__code__", None)
        is_kerass = type(self.layer).__module__.startswith("keras.")
        where = "" if code is None or is_kerass else f", {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        what = (
            "the loss that it adds, which is neither a mean nor a sum over examples (make the tensor an output of the "
            "model and the loss one for `compile`)"
        )
        return f"{self.layer.path} ({type(self.layer).__name__}{where}): {what if self.key else 'its outputs'}"


@contextlib.contextmanager
def _seen() -> Iterator[list[Seen]]:
    """Notes what layers compute in this thread within this block, in their order; not in loops and functions."""
    seen, graph, counts = [], tf.compat.v1.get_default_graph(), {}

    def note(layer: keras.Layer, value, key: Key | None = None, output: str = "") -> None:
        for leaf in tf.nest.flatten(value, expand_composites=True):
            if tf.is_tensor(leaf) and leaf.dtype.is_floating and getattr(leaf, "graph", None) is graph:
                seen.append(Seen(layer, key, leaf, output))

    def call(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        if isinstance(layer, keras.Model):
            for name, output in zip(output_names(layer, outputs), keras.tree.flatten(outputs), strict=False):
                note(layer, output, output=name)
        else:
            note(layer, outputs)
        return outputs

    def add_loss(original, layer, loss):
        note(layer, loss, (id(layer), next(counts.setdefault(id(layer), itertools.count()))))
        return original(layer, loss)

    with (
        compat.replaced_here(keras.Layer, "__call__", call),
        compat.replaced_here(keras.Layer, "add_loss", add_loss),
    ):
        yield seen


def compare_layers(
    alone: Callable[[], None], in_towers: Callable[[Callable], list], tolerance: float, reset: Callable[[], None]
) -> tuple[Seen | None, set[Key]]:
    """Does a step on one device and in towers, and compares what the layers compute.

    Args:
      alone: does the step.
      in_towers: (function to run around each tower's step) -> over towers, what it returned.
      tolerance: relative, of what counts as equal.
      reset: gives variables their first values, before either.

    Returns:
      The first thing that towers compute otherwise, or None; and the added losses that are sums over examples.
    """
    kept: dict[str, list] = {}

    def one() -> list[tf.Tensor]:
        with _seen() as seen:
            alone()
        kept["one"] = seen
        return [each.tensor for each in seen]

    def around(step: Callable) -> list[Seen]:
        with _seen() as seen:
            step()
        return seen

    def many() -> list[list[tf.Tensor]]:
        kept["many"] = in_towers(around)
        return [[each.tensor for each in seen] for seen in kept["many"]]

    def values(function: Callable):
        reset()
        return tf.function(function, autograph=False)()

    whole, by_tower = values(one), values(many)
    first, sums = None, set()
    for seen, value, *parts in zip(kept["one"], whole, *by_tower, strict=False):
        axes = range(1) if seen.output else None  # a model's outputs are joined by their first axis
        found = relation(np.asarray(value), list(map(np.asarray, parts)), tolerance, axes)
        if seen.key and found == SUM:
            sums.add(seen.key)
        elif first is None and (found is None or (seen.key and found not in ("same", MEAN))):
            first = seen
    return first, sums


@contextlib.contextmanager
def summed(keys: set[Key], share: tf.Tensor) -> Iterator[None]:
    """Lets layers in a tower within this block add losses that are sums over examples such that the mean over towers,
    weighted by their share of the examples, is the sum over all."""
    counts: dict[int, itertools.count] = {}

    def add_loss(original, layer, loss):
        key = id(layer), next(counts.setdefault(id(layer), itertools.count()))
        if key in keys:
            loss = keras.tree.map_structure(lambda each: tf.math.divide_no_nan(each, tf.cast(share, each.dtype)), loss)
        return original(layer, loss)

    with compat.replaced_here(keras.Layer, "add_loss", add_loss) if keys else contextlib.nullcontext():
        yield
