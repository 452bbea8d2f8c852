"""The description that workers of one Keras model compare: {name: text} of all that must be the same in each."""

import re
import zlib

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.workers import SEED


def call(given: dict) -> dict:
    """Describes by name all that must be the same in each worker of a call of fit or evaluate."""
    return {
        name: _data(value) if name in ("x", "y", "sample_weight", "validation_data") else _text(value)
        for name, value in given.items()
        if name not in ("verbose", "callbacks") and value is not None
    }


def _data(data) -> str:
    if isinstance(data, tf.data.Dataset):
        if compat.has_unseeded_shuffle(data):
            raise errors.ConfigError(f"A data set's shuffle has no seed: each worker would have another order. {SEED}")
        return f"a data set of {int(data.cardinality())} batches"
    if isinstance(data, keras.utils.PyDataset):
        return f"a PyDataset of {data.num_batches} batches"
    sizes = [leaf.shape[0] for leaf in keras.tree.flatten(data) if getattr(leaf, "shape", None)]
    return f"{sizes[0]} examples" if sizes else type(data).__name__


def optimizer(optimizer) -> dict:
    return {f"the optimizer's {name}": _text(value) for name, value in optimizer.get_config().items() if name != "name"}


def model(model: keras.Model) -> str:
    """A model's size, and a number that tells it from others."""
    layers = [(type(layer).__name__, _config(layer)) for layer in compat.sublayers(model)]
    return f"{variables(model.variables)} in {len(layers)} layers ({_checksum(layers)})"


def variables(variables: list[keras.Variable]) -> str:
    shapes = [(tuple(variable.shape), variable.dtype, variable.trainable) for variable in variables]
    count = sum(int(np.prod(shape)) for shape, *_ in shapes)
    return f"{len(shapes)} variables of {count} numbers ({_checksum(shapes)})"


def _config(layer: keras.Layer) -> dict:
    try:
        return _nameless(layer.get_config())
    except (NotImplementedError, TypeError, ValueError):  # of a layer of the user's own, which has none
        return {}


def _nameless(value):
    """Without names, which depend on what else a program makes, and without inner layers, which are told of too."""
    if isinstance(value, dict):
        return {name: _nameless(each) for name, each in value.items() if name not in ("name", "layers")}
    return [_nameless(each) for each in value] if isinstance(value, (list, tuple)) else value


def _checksum(value) -> str:
    return f"{zlib.crc32(_text(value).encode()):08x}"


def _text(value) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
