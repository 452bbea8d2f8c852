"""Calls of a user's model_fn and input_fn with those of the arguments that they take."""

import inspect
from collections.abc import Callable
from typing import Any

from tower_train import errors
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec


def call_with_taken(function: Callable, *positional, **arguments) -> Any:
    """Calls a function with positional arguments, and with those of the others that it has a parameter for."""
    takes = inspect.signature(function).parameters
    return function(*positional, **{name: value for name, value in arguments.items() if name in takes})


def call_model_fn(model_fn: Callable, features, labels, mode: str, params: dict, config: RunConfig) -> EstimatorSpec:
    """Calls a model_fn with those of the arguments that it takes.

    Raises:
      GraphError: it cannot take the labels, or does not return an EstimatorSpec for this mode.
    """
    if labels is not None and "labels" not in inspect.signature(model_fn).parameters:
        raise errors.GraphError(
            "model_fn takes no labels, but input_fn gives some. Add an argument `labels` to model_fn."
        )
    spec = call_with_taken(model_fn, features, labels=labels, mode=mode, params=params, config=config)
    if not isinstance(spec, EstimatorSpec):
        raise errors.GraphError(
            f"model_fn returned a {type(spec).__name__}; it must return a tower_train.estimator.EstimatorSpec."
        )
    if spec.mode != mode:
        raise errors.GraphError(f"model_fn was called for mode {mode!r} and returned a spec for mode {spec.mode!r}.")
    return spec
