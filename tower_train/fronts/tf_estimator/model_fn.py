"""Calls of a user's functions with the arguments that they take, by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tower_train import errors
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec

_OF_MODEL_FN = ("features", "labels", "mode", "params", "config")


def call_with_taken(function: Callable, **arguments) -> Any:
    """Calls a function with the arguments for which it has parameters that are not bound already."""
    takes = _parameters(function)
    return function(**{name: value for name, value in arguments.items() if name in takes})


def check_parameters(function: Callable, name: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError if a function needs an argument that it will not get.

    Args:
      function: the user's.
      name: in messages.
      allowed: the arguments that it may take.
    """
    empty = inspect.Parameter.empty
    others = [key for key, taken in _parameters(function).items() if taken.default is empty and key not in allowed]
    if others:
        given = ", ".join(allowed) or "none"
        raise errors.ConfigError(
            f"{name} takes {', '.join(others)}, which it is not given: its arguments may be {given}, in any order. "
            "Bind others with functools.partial."
        )


def check_model_fn(model_fn: Callable, params) -> None:
    """Raises ConfigError if a model_fn cannot be called with features, and with params if there are any."""
    if not callable(model_fn):
        raise errors.ConfigError(f"model_fn must be a function; got {model_fn!r}.")
    check_parameters(model_fn, "model_fn", _OF_MODEL_FN)
    takes = _parameters(model_fn)
    if "features" not in takes:
        raise errors.ConfigError(
            f"model_fn takes {', '.join(takes) or 'nothing'}; it must take features. Arguments are passed by name."
        )
    if params and "params" not in takes:
        raise errors.ConfigError(f"params={params} were given, but model_fn takes no argument params. Add it.")


def call_model_fn(model_fn: Callable, features, labels, mode: str, params: dict, config: RunConfig) -> EstimatorSpec:
    """Calls a model_fn with the arguments that it takes. Raises GraphError if it cannot take the labels, or does not
    return an EstimatorSpec for this mode."""
    if labels is not None and "labels" not in _parameters(model_fn):
        raise errors.GraphError(
            "model_fn takes no labels, but input_fn gives some. Add an argument `labels` to model_fn."
        )
    spec = call_with_taken(model_fn, features=features, labels=labels, mode=mode, params=params, config=config)
    if not isinstance(spec, EstimatorSpec):
        raise errors.GraphError(
            f"model_fn returned a {type(spec).__name__}; it must return a tower_train.estimator.EstimatorSpec."
        )
    if spec.mode is None:
        return EstimatorSpec(**spec._asdict() | {"mode": mode})
    if spec.mode != mode:
        raise errors.GraphError(f"model_fn was called for mode {mode!r} and returned a spec for mode {spec.mode!r}.")
    return spec


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a function that functools.partial has not bound."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters
    return {name: taken for name, taken in found.items() if name not in bound and taken.kind not in unnamed}
