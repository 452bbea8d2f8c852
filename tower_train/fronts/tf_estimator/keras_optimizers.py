"""Keras optimizers in the graph of an Estimator, which apply the mean of the towers' gradients."""

import copy
import re
from collections.abc import Callable

import keras
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import captured, library

v1 = tf.compat.v1


def copies_of(optimizer: keras.optimizers.Optimizer) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that makes optimizers like this one, which stays as it is, in the default graph."""
    with compat.eager_mode():
        config = optimizer.get_config()
    return lambda: type(optimizer).from_config(copy.deepcopy(config))  # it takes parts out


class KerasOptimizer:
    """A Keras optimizer with the interface of tf.compat.v1.train's, for use in a model_fn.

    Args:
      make: returns the Keras optimizer, of the default graph; called once per training graph.
    """

    def __init__(self, make: Callable[[], keras.optimizers.Optimizer]):
        self._make = make
        self._optimizer: keras.optimizers.Optimizer | None = None  # of the graph that is being built

    def minimize(self, loss: tf.Tensor, global_step=None, var_list: list[tf.Variable] | None = None) -> tf.Operation:
        """Returns the op that does a step."""
        weights = var_list or v1.trainable_variables()
        variables = {weight.ref(): _stored_in(weight) for weight in weights}
        if captured.current().is_first:  # its optimizer is all towers'
            self._optimizer = self._make()
            # Initial values wait for nothing.
            with tf.control_dependencies(None), tf.variable_creator_scope(_named_under(self._optimizer.name)):
                self._optimizer.build(list(variables.values()))
        optimizer = self._optimizer or self._make()  # a canned Estimator has one of its own in each tower
        grads = v1.gradients(optimizer.scale_loss(loss), weights)

        def apply(mean_grads):
            trained = [variables[weight.ref()] for _, weight in mean_grads]

            def update(*grads):
                optimizer.apply(grads, trained)
                return tf.constant(0) if global_step is None else global_step.assign_add(1)

            # Within a function TensorFlow keeps the order of Keras' assignments.
            return tf.function(update, autograph=False)(*[grad for grad, _ in mean_grads])

        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return captured.current().record(list(zip(grads, weights, strict=True)), apply, looks_itself=scales)


def _stored_in(weight: tf.Variable) -> keras.Variable:
    """Returns a Keras variable stored in this variable of the graph."""
    with tf.variable_creator_scope(lambda create, **kwargs: weight):
        return keras.Variable("zeros", weight.shape, weight.dtype.name, name=weight.op.name.replace("/", "_"))


def _named_under(scope: str) -> Callable:
    """Returns a variable creator with plain names, without the numbers that Keras gives to optimizers and scopes."""
    scope = re.sub(r"_\d+$", "", scope)

    def create_named(create, **kwargs):
        with v1.name_scope(None):
            return create(**(kwargs | {"name": f"{scope}/{kwargs['name']}"}))

    return create_named


def _for_canned(optimizer) -> KerasOptimizer | None:
    """Returns the KerasOptimizer of a canned Estimator's optimizer, or None if that is not one of Keras."""
    made = optimizer() if callable(optimizer) else optimizer
    if not isinstance(made, keras.optimizers.Optimizer):
        return None
    return KerasOptimizer((lambda: made) if callable(optimizer) else copies_of(made))


library.convert_optimizers(_for_canned)
