"""Checks of an Estimator's arguments; each error names what was received and what is allowed."""

import numbers
import os
import tempfile

import tensorflow as tf

from tower_train import console, errors
from tower_train.config import check_folder
from tower_train.fronts.tf_estimator.run_config import RunConfig, get_default_session_config
from tower_train.fronts.tf_estimator.task import EVALUATOR

v1 = tf.compat.v1


def config_with_model_dir(config: RunConfig | None, model_dir) -> RunConfig:
    """Returns the config with the model_dir, or a new temporary one if neither names it, and with a session_config.
    Raises ConfigError if config is no RunConfig or names another model_dir, or model_dir is no local directory."""
    config = config or RunConfig()
    if not isinstance(config, RunConfig):
        raise errors.ConfigError(f"config must be a tower_train.estimator.RunConfig; got a {type(config).__name__}.")
    model_dir = None if model_dir is None else os.fspath(model_dir)
    if model_dir and config.model_dir and model_dir != config.model_dir:
        raise errors.ConfigError(f"model_dir={model_dir} and RunConfig's {config.model_dir} differ. Give one of them.")
    model_dir = model_dir or config.model_dir
    if not model_dir and config.task_type == EVALUATOR:
        raise errors.ConfigError(
            "An evaluator watches the model_dir that the chief writes. Give that, as to all tasks."
        )
    if not model_dir:
        model_dir = tempfile.mkdtemp()
        console.notice(f"No model_dir was given; using the temporary {model_dir}.")
    check_directory(model_dir, "model_dir")
    return config.replace(model_dir=model_dir, session_config=config.session_config or get_default_session_config())


def check_directory(path: str, name: str) -> None:
    """Raises ConfigError if a path is a file, or in no file system."""
    check_folder(path, f"{name}={path}")
    if os.path.isfile(path):
        raise errors.ConfigError(f"{name}={path} is a file; it must be a directory, or not be there yet.")


def check_input_fn(input_fn) -> None:
    """Raises ConfigError if it is no function, but for example the data set itself."""
    if not callable(input_fn):
        raise errors.ConfigError(
            f"input_fn is a {type(input_fn).__name__}; it must be a function that makes and returns a tf.data.Dataset "
            "of (features, labels), such as lambda: tf.data.Dataset.from_tensor_slices(...).batch(32)."
        )


def check_steps(steps, max_steps=None) -> None:
    """Raises ConfigError if a count is no number above 0, or both are given."""
    if steps is not None and max_steps is not None:
        raise errors.ConfigError(
            f"steps={steps} and max_steps={max_steps} exclude each other: steps counts from here, max_steps from the "
            "very first step. Give one of them."
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise errors.ConfigError(f"{name}={value!r}; it must be a number, or None.")
        if value <= 0:
            raise errors.ConfigError(f"{name}={value}; it must be above 0, or None.")


def checked_hooks(hooks) -> list[v1.train.SessionRunHook]:
    """Returns session hooks as a list; ConfigError if one is none."""
    return _checked_list("hooks", hooks, v1.train.SessionRunHook)


def checked_listeners(listeners) -> list[v1.train.CheckpointSaverListener]:
    """Returns saving_listeners as a list; ConfigError if one is none."""
    return _checked_list("saving_listeners", listeners, v1.train.CheckpointSaverListener)


def _checked_list(name: str, values, kind: type) -> list:
    try:
        values = list(values or ())
    except TypeError:
        raise errors.ConfigError(f"{name}={values!r}; it must be a list.") from None
    for value in values:
        if not isinstance(value, kind):
            raise errors.ConfigError(f"{name}: got {value!r}; each must be a tf.compat.v1.train.{kind.__name__}.")
    return values
