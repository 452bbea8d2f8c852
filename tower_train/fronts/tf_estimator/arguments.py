"""Checks of an Estimator's arguments; each error says what was received and what is allowed."""

import os
import tempfile
from collections.abc import Callable

import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts.tf_estimator.run_config import RunConfig

v1 = tf.compat.v1


def check_model_fn(model_fn: Callable) -> None:
    """Raises ConfigError if it is not a function."""
    if not callable(model_fn):
        raise errors.ConfigError(f"model_fn must be a function; got {model_fn!r}.")


def config_with_model_dir(config: RunConfig | None, model_dir) -> RunConfig:
    """Returns the config with the model_dir, or a new temporary one if neither names it.

    Raises:
      ConfigError: config is no RunConfig, or names another model_dir.
    """
    config = config or RunConfig()
    if not isinstance(config, RunConfig):
        raise errors.ConfigError(f"config must be a tower_train.estimator.RunConfig; got a {type(config).__name__}.")
    model_dir = None if model_dir is None else os.fspath(model_dir)
    if model_dir and config.model_dir and model_dir != config.model_dir:
        raise errors.ConfigError(f"model_dir={model_dir} and RunConfig's {config.model_dir} differ. Give one of them.")
    model_dir = model_dir or config.model_dir
    if not model_dir:
        model_dir = tempfile.mkdtemp()
        console.notice(f"No model_dir was given; using the temporary {model_dir}.")
    return config.replace(model_dir=model_dir) if config.model_dir != model_dir else config


def check_steps(steps: int | None, max_steps: int | None) -> None:
    """Raises ConfigError if a count is not above 0, or if both are given."""
    if steps is not None and max_steps is not None:
        raise errors.ConfigError(
            f"steps={steps} and max_steps={max_steps} exclude each other: steps counts from here, max_steps from the "
            "very first step. Give one of them."
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value <= 0:
            raise errors.ConfigError(f"{name}={value}; it must be above 0, or None.")


def checked_hooks(hooks) -> list[v1.train.SessionRunHook]:
    """Returns session hooks as a list; raises ConfigError if one is none."""
    hooks = list(hooks or ())
    for hook in hooks:
        if not isinstance(hook, v1.train.SessionRunHook):
            raise errors.ConfigError(f"hooks: got {hook!r}; each must be a tf.compat.v1.train.SessionRunHook.")
    return hooks
