"""A workload's functions, called with a check of what they return."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.examples import TRAIN, Examples

_TENSORS = "a tensor, or a tuple or dict of tensors, each [batch, ...]"
_KEPT = re.compile(r"Tensor\W+(?:tower_\d+/)?([^\"':]+).*(must be from the same graph as|is out of scope)", re.DOTALL)


def call(workload, name: str, *args, **keywords) -> Any:
    """Calls one of a workload's functions by its name.

    Raises:
      GraphError: it cannot be called so, uses a tensor of another call, or returned what it may not.
    """
    function, owner = getattr(workload, name), f"workload {workload.name}"
    if not callable(function):
        raise errors.GraphError(f"{owner}: {name} is {errors.described(function)}. Let it be a function.")
    _check_parameters(function, f"{owner}: {name}", name, args, keywords)
    try:
        returned = function(*args, **keywords)
    except (TypeError, ValueError) as error:  # TensorFlow's InaccessibleTensorError is a TypeError
        if kept := _KEPT.search(str(error)):
            raise errors.GraphError(
                f"{owner}: {name} uses the tensor {kept[1]} of an earlier call, which belongs to another graph: each "
                "call builds its own. Keep numbers of numpy or Python between calls, and make the tensor in each."
            ) from error
        raise
    if name in _RETURNED:
        is_right, wanted = _RETURNED[name]
        if not is_right(returned, *args):
            raise errors.returned(owner, name, returned, wanted)
    return returned


def _check_parameters(function: Callable, what: str, name: str, args: tuple, keywords: dict) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C tells none
        return
    # Keras' order would go wrong in silence, but for a loss of Keras, as whose it is called
    if next(iter(signature.parameters), None) == "y_true" and not hasattr(function, "reduction"):
        raise errors.GraphError(f"{what} takes y_true first. Let it be a function of (outputs, labels).")
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        taken = ", ".join([*_PARAMETERS[name].split(), *(f"{keyword}=" for keyword in keywords)])
        raise errors.GraphError(f"{what} is a function of {signature} ({error}). Let it be {name}({taken}).") from None


def _are_features(returned, features, *_) -> bool:
    [batch, *_] = tf.nest.flatten(features)
    return _are_tensors(returned) and all(
        each.shape.rank != 0 and each.shape[:1].is_compatible_with(batch.shape[:1])
        for each in tf.nest.flatten(returned)
    )


def _are_tensors(returned) -> bool:
    return bool(flat := tf.nest.flatten(returned)) and all(map(tf.is_tensor, flat))


def _are_metrics(returned, *_) -> bool:
    if not isinstance(returned, Mapping) or not returned:
        return False
    return all(isinstance(name, str) and value is not None for name, value in returned.items())


_PARAMETERS = {
    "examples": "request",
    "inference": "features training",
    "loss": "outputs labels",
    "metrics": "outputs labels",
    "augment": "features draws",
    "prepare": "features",
}
_RETURNED = {  # name: (whether a value that it returns is right, given the arguments too; what is)
    "examples": (
        lambda returned, request: isinstance(returned, Examples) or returned is None and request.split != TRAIN,
        "a tower_train.Examples, as Examples.from_arrays(name, features, labels) makes one of arrays",
    ),
    "inference": (
        lambda value, *_: _are_tensors(value) and any(each.dtype.is_floating for each in tf.nest.flatten(value)),
        f"{_TENSORS}, computed from the features by TensorFlow, in floating point",
    ),
    "loss": (
        lambda value, *_: tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0,
        "a floating-point scalar, the mean over the batch it was given, as tf.reduce_mean does",
    ),
    "metrics": (_are_metrics, "{name: tensor [batch]}, at least one metric, with texts as names"),
    "augment": (_are_features, f"features: {_TENSORS}, of the batch it was given"),
    "prepare": (_are_features, f"features: {_TENSORS}, of the batch it was given"),
}
