"""A workload's functions, called with a check of what they return."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.examples import TRAIN, Examples

_KEPT = re.compile(
    r"Tensor[ (][\"'](?:tower_\d+/)?([^\"':]+).*(?:must be from the same graph as|is out of scope)", re.DOTALL
)
_TENSORS = "a tensor, or a tuple or dict of tensors, each [batch, ...]"


def call(workload, name: str, *args, **keywords) -> Any:
    """Calls one of a workload's functions by its name.

    Raises:
      GraphError: it cannot be called so, returned what it may not, or left the program.
    """
    function, owner = getattr(workload, name), f"workload {workload.name}"
    parameters, is_right, wanted = _FUNCTIONS[name]
    if not callable(function):
        raise errors.GraphError(
            f"{owner}: {name} is {errors.described(function)}. Let it be a function of {parameters}."
        )
    if why := _why_not_callable(function, args, keywords):
        taken = ", ".join([parameters[:-1], *(f"{argument}=" for argument in keywords)])
        raise errors.GraphError(f"{owner}: {name} is a function of {why}. Let it be one of {taken}).")
    try:
        returned = function(*args, **keywords)
    except SystemExit as error:
        raise errors.GraphError(
            f"{owner}: {name} left the program by sys.exit({error.code!r}). Let it raise an error, or return."
        ) from error
    except (TypeError, ValueError) as error:  # TensorFlow's InaccessibleTensorError is a TypeError
        if kept := _KEPT.search(str(error)):
            raise errors.GraphError(
                f"{owner}: {name} uses the tensor {kept[1]} of an earlier call, which belongs to another graph: each "
                "call builds its own. Keep numbers of numpy or Python between calls, and make the tensor in each."
            ) from error
        raise
    if not is_right(returned, *args):
        raise errors.returned(owner, name, returned, wanted)
    return returned


def _why_not_callable(function: Callable, args: Sequence, keywords: Mapping) -> str | None:
    """Returns a function's parameters, and why they do not take these arguments; None if they do."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C tells none
        return None
    is_loss = hasattr(function, "reduction")  # of Keras, as whose it is called
    if next(iter(signature.parameters), None) == "y_true" and not is_loss:  # its order would go wrong in silence
        return f"{signature}"
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        return f"{signature} ({error})"
    return None


def _are_features(returned, features, *_) -> bool:
    [batch, *_] = tf.nest.flatten(features)
    return _are_tensors(returned) and all(
        each.shape.rank != 0 and each.shape[:1].is_compatible_with(batch.shape[:1])
        for each in tf.nest.flatten(returned)
    )


def _are_tensors(returned) -> bool:
    return bool(flat := tf.nest.flatten(returned)) and all(map(tf.is_tensor, flat))


def _are_views(returned, *_) -> bool:
    return (
        isinstance(returned, Sequence)
        and bool(returned)
        and all(isinstance(view, Sequence) and len(view) == 2 and _are_tensors(view[1]) for view in returned)
    )


def _are_metrics(returned, *_) -> bool:
    if not isinstance(returned, Mapping) or not returned:
        return False
    return all(isinstance(name, str) and value is not None for name, value in returned.items())


_FUNCTIONS = {  # name: (its parameters, whether a value that it returns is right, given the arguments too; what is)
    "examples": (
        "(request)",
        lambda returned, request: isinstance(returned, Examples) or returned is None and request.split != TRAIN,
        "a tower_train.Examples, as Examples.from_arrays(name, features, labels) makes one of arrays",
    ),
    "inference_for": ("(examples)", lambda value, _: callable(value), "the function inference(features, training)"),
    "inference": (
        "(features, training)",
        lambda value, *_: _are_tensors(value) and any(each.dtype.is_floating for each in tf.nest.flatten(value)),
        f"{_TENSORS}, computed from the features by TensorFlow, in floating point",
    ),
    "loss": (
        "(outputs, labels)",
        lambda value, *_: tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0,
        "a floating-point scalar, the mean over the batch it was given, as tf.reduce_mean does",
    ),
    "metrics": ("(outputs, labels)", _are_metrics, "{name: tensor [batch]}, at least one metric, with texts as names"),
    "augment": ("(features, draws)", _are_features, f"features: {_TENSORS}, of the batch it was given"),
    "mix": (
        "(features, labels, draws)",
        lambda returned, *_: isinstance(returned, tuple) and len(returned) == 2,
        "a pair (features, labels)",
    ),
    "prepare": ("(features)", _are_features, f"features: {_TENSORS}, of the batch it was given"),
    "test_time_augmentation": ("(features)", _are_views, "a list of views (weight, features)"),
    "unsure": (
        "(outputs)",
        lambda value, *_: tf.is_tensor(value) and value.dtype == tf.bool and value.shape.rank == 1,
        "a tensor [batch] of dtype bool",
    ),
}
