"""Keras models built apart from the program's use of Keras, and the names of their variables in a graph."""

import concurrent.futures
import contextlib
import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.graph import context, towers

_NEAR = 5  # layers that a message suggests


def build_isolated(work: Callable[[keras.StatelessScope | None], Any], dtype: str = "float32", valued: bool = False):
    """Calls a function that builds Keras models, isolated from the program's use of Keras and TensorFlow.

    A thread begins with an empty state of Keras, in which layers without a name are numbered from 0 on, and outside of
    any graph. No variable gets a value there; assignments, such as of loaded weights, are noted.

    Args:
      work: gets the scope that notes assignments.
      dtype: Keras' default for layers.
      valued: give variables values after all, as Keras does; without a scope.

    Returns:
      The function's result.
    """

    def in_thread():
        built_here = context.entered(context.Context(builds_keras=True))
        with built_here, compat.eager_mode(), tf.device("/cpu:0"), floatx(dtype):
            keras.config.set_dtype_policy(dtype if dtype == kept_in(dtype) else f"mixed_{dtype}")
            with contextlib.nullcontext() if valued else keras.StatelessScope(initialize_variables=False) as assigned:
                return work(assigned)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(in_thread).result()


def freeze(model: keras.Model, until: str) -> None:
    """Makes the layers of model.layers up to a named one not trainable; ConfigError without such a layer."""
    names = [layer.name for layer in model.layers]
    if until not in names:
        near = difflib.get_close_matches(until, names, _NEAR, cutoff=0.4)
        meant = f"Did you mean {' or '.join(near)}? " if near else ""
        raise errors.ConfigError(
            f"--freeze_until={until}: {model.name} has no layer of that name. {meant}"
            f"Its {len(names)} layers run from {', '.join(names[:_NEAR])} to {', '.join(names[-_NEAR:])}."
        )
    for layer in model.layers[: names.index(until) + 1]:
        layer.trainable = False


def kept_in(dtype: str) -> str:
    """Returns the dtype of variables for arithmetic in this one."""
    return towers.variable_dtype(tf.as_dtype(dtype)).name


@contextlib.contextmanager
def floatx(dtype: str) -> Iterator[None]:
    """Makes the dtype of variables Keras' default, also of Python's numbers, within this block."""
    before = keras.config.floatx()
    keras.config.set_floatx(kept_in(dtype))
    try:
        with compat.python_floats():
            yield
    finally:
        keras.config.set_floatx(before)


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns a model's variables, but for its metrics', by their names in a graph; GraphError if two have one."""
    metrics = {id(variable) for variable in model.metrics_variables}
    named: dict[str, keras.Variable] = {}
    for variable in model.variables:
        name = re.sub(r"[^\w.\-/]", "_", variable.path, flags=re.ASCII)
        if name in named:
            raise errors.GraphError(
                f"keras_network: {model.name} has several variables named {name}. Give its layers different names."
            )
        if id(variable) not in metrics:
            named[name] = variable
    return named
