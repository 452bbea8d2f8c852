"""Keras models built apart from the program's use of Keras; names, initial values and a scope of their variables."""

import concurrent.futures
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.data.arrays import outside_graph
from tower_train.fronts import compat
from tower_train.graph import context
from tower_train.graph.devices import HOST
from tower_train.graph.variables import variable_dtype

v1 = tf.compat.v1


def build_isolated(work: Callable[[keras.StatelessScope | None], Any], dtype: str = "float32", valued: bool = False):
    """Calls a function that builds Keras models, isolated from the program's use of Keras and TensorFlow.

    A thread begins with an empty state of Keras, in which layers without a name are numbered from 0 on, and outside of
    any graph. No variable gets a value there; the scope that `work` gets notes assignments, such as of loaded weights.
    `valued` gives variables values after all, as Keras does, without a scope. dtype is Keras' default for layers.
    """

    def in_thread():
        built_here = context.entered(context.Context(builds_keras=True))
        with built_here, compat.eager_mode(), tf.device("/cpu:0"), floatx(dtype):
            keras.config.set_dtype_policy(dtype if dtype == kept_in(dtype) else f"mixed_{dtype}")
            if valued:
                return work(None)
            with keras.StatelessScope(initialize_variables=False) as assigned, compat.without_compiling():
                return work(assigned)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(in_thread).result()


def kept_in(dtype: str) -> str:
    """Returns the dtype of variables for arithmetic in this one."""
    return variable_dtype(tf.as_dtype(dtype)).name


def floatx(dtype: str):
    """Makes the dtype of variables Keras' default, also of Python's numbers, within this block."""
    return compat.floatx(kept_in(dtype))


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns a model's variables, except its metrics', by their names in a graph; GraphError for a repeated name."""
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


def features_fault(model: keras.Model, features) -> str | None:
    """Returns why features do not fit a model's keras.Input, in one line instead of Keras' pages; None if they do."""
    inputs, given = tf.nest.flatten(getattr(model, "inputs", None) or []), tf.nest.flatten(features)
    if isinstance(features, Mapping):
        named = model.input if inputs and isinstance(model.input, Mapping) else {each.name: each for each in inputs}
        if missing := [name for name in named if len(inputs) > 1 and name not in features]:
            return (
                f"{model.name} has an input {missing[0]!r}, and the examples have the features "
                f"{', '.join(features)}. Call both the same, as in keras.Input(..., name={next(iter(features))!r})."
            )
        pairs = [(wanted, features[name]) for name, wanted in named.items() if name in features]
    else:
        pairs = list(zip(inputs, given, strict=False))
    for wanted, tensor in pairs:
        if tensor is None or not tensor.shape.rank:
            continue
        sizes, found = list(wanted.shape[1:]), tensor.shape[1:].as_list()
        fits = any(  # Keras adds or drops a last dimension of 1
            len(each) == len(sizes)
            and all(None in pair or len(set(pair)) == 1 for pair in zip(each, sizes, strict=True))
            for each in (found, [*found, 1], found[:-1] if found[-1:] == [1] else found)
        )
        if not fits or (tensor.dtype == tf.string) != (wanted.dtype == "string"):
            return (
                f"{model.name} takes {wanted.dtype} {[None, *sizes]}"
                f"{f' as {wanted.name}' if len(inputs) > 1 else ''}, and the examples give {tensor.dtype.name} "
                f"{[None, *found]}. Let its keras.Input be what they have."
            )
    return None


def output_names(model: keras.Model, outputs) -> list[str]:
    """Returns the names of a model's outputs, a structure."""
    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name]
    count = len(keras.tree.flatten(outputs))
    return getattr(model, "output_names", None) or [f"output_{i + 1}" for i in range(count)]


def as_initializer(variable: keras.Variable, assigned: tf.Tensor | None):
    """Returns an initializer for get_variable; `assigned` is the value of the variable in the scope in which its model
    was built, such as a loaded weight, or None."""
    initializer = compat.pending_initializer(variable)
    if assigned is None and initializer is None:  # the model was built elsewhere
        assigned = variable.value
    if assigned is not None:
        return constant(np.asarray(assigned))
    if compat.is_seed_state(variable):  # Keras' initializer would draw it by the program's state, not by the run's seed
        return v1.random_uniform_initializer(0, 2**31 - 1, dtype=variable.dtype)
    return initializer


def constant(value: np.ndarray):
    """Returns an initializer whose value stays out of the graph, which is written to disk with each checkpoint."""

    def initial_value(shape, dtype=None, partition_info=None):
        # TensorFlow would place it with its variable; it comes from Python, for which a GPU has no kernel.
        with compat.op_attributes({}), tf.device(HOST):
            return tf.ensure_shape(outside_graph(value), shape)

    return initial_value


class TowerScope(keras.StatelessScope):
    """A scope in which layers and programs compute on given values of variables, and what they assign is noted.

    Args:
      values: (variable, value), used instead of the variable's own value. Gradients also
        reach a weight through values assigned to it, as on one device.
    """

    def __init__(self, values: Iterable[tuple]):
        # Variables without a value are a model's that was built for its layers only, and get none here.
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}  # by id

    def add_update(self, update):
        variable, value = update
        before = self.get_current_value(variable)
        self.assigned[id(variable)] = update
        is_of_weight = before is not None and variable.trainable
        super().add_update((variable, _assigned(tf.convert_to_tensor(before), value) if is_of_weight else value))


@tf.custom_gradient
def _assigned(before: tf.Tensor, value: tf.Tensor):
    """Returns a value assigned to a weight; its gradient goes to the weight."""
    return tf.identity(value), lambda grad: (grad, None)
