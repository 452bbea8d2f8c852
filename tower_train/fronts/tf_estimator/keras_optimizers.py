"""Keras optimizers in the graph of an Estimator, which apply the mean of the towers' gradients."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import captured, library

v1 = tf.compat.v1


def copies_of(optimizer: keras.optimizers.Optimizer) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that makes optimizers like this one, which stays as it is, in the default graph.

    Keras numbers the names of all optimizers but a program's first: the copies, and so checkpoints, have no number.
    """
    with compat.eager_mode():
        found = keras.optimizers.serialize(optimizer)
    described = found
    while described:
        described["config"]["name"] = re.sub(r"_\d+$", "", described["config"]["name"])
        described = described["config"].get("inner_optimizer")  # of one that scales the loss
    return lambda: keras.optimizers.deserialize(copy.deepcopy(found))  # it takes parts out


class KerasOptimizer:
    """A Keras optimizer with the interface of tf.compat.v1.train's: it trains variables of the default graph.

    Args:
      make: returns the Keras optimizer, of the default graph; called once per training graph.
    """

    def __init__(self, make: Callable[[], keras.optimizers.Optimizer]):
        self._make = make
        self._optimizer: keras.optimizers.Optimizer | None = None  # of the graph that is being built

    def minimize(self, loss: tf.Tensor, global_step=None, var_list: list[tf.Variable] | None = None) -> tf.Operation:
        """Returns the op that does a step, within a call of a model_fn."""
        weights = var_list or v1.trainable_variables()
        variables = list(map(_stored_in, weights))
        return self.apply_gradients(self.gradients(loss, weights, variables), weights, variables, global_step)

    def gradients(self, loss: tf.Tensor, weights, variables: list[keras.Variable]) -> list[tf.Tensor | None]:
        """Returns this tower's gradients of the loss, scaled as the optimizer needs; see apply_gradients."""
        if not captured.tower():  # the first tower's optimizer is all towers'
            with tf.control_dependencies(None):  # initial values wait for nothing
                self._optimizer = self._make()
                with _standing_in(weights, variables), tf.variable_creator_scope(_named_under(self._optimizer.name)):
                    self._optimizer.build(variables)
        optimizer = self._optimizer or self._make()  # a canned Estimator has one of its own in each tower
        return v1.gradients(optimizer.scale_loss(loss), weights)

    def apply_gradients(self, grads, weights, variables: list[keras.Variable], global_step) -> tf.Operation:
        """Returns the op that applies gradients.

        Args:
          grads: over weights, this tower's, from `gradients`.
          weights: the graph's variables.
          variables: over weights, their Keras variables.
          global_step: the counter of steps to increment; None for none.
        """
        optimizer = self._optimizer

        def apply(mean_grads):
            names = {w.ref(): v for w, v in zip(weights, variables, strict=True)}
            trained = [names[w.ref()] for _, w in mean_grads]

            def update(*grads):
                with _standing_in(weights, variables):
                    optimizer.apply(grads, trained)
                return tf.constant(0) if global_step is None else global_step.assign_add(1)

            # Within a function TensorFlow keeps the order of Keras' assignments.
            return tf.function(update, autograph=False)(*[grad for grad, _ in mean_grads])

        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return captured.record(zip(grads, weights, strict=True), apply, looks_itself=scales)


def _stored_in(weight: tf.Variable) -> keras.Variable:
    """Returns a Keras variable stored in this variable of the graph."""
    with tf.variable_creator_scope(lambda create, **kwargs: weight):
        return keras.Variable("zeros", weight.shape, weight.dtype.name, name=weight.op.name.replace("/", "_"))


def _named_under(scope: str) -> Callable:
    """Returns a variable creator with plain names: Keras' name scopes get meaningless numbers here."""

    def create_named(create, **kwargs):
        with v1.name_scope(None):
            return create(**(kwargs | {"name": f"{scope}/{kwargs['name']}"}))

    return create_named


@contextlib.contextmanager
def _standing_in(weights: list[tf.Variable], variables: list[keras.Variable]) -> Iterator[None]:
    """Makes the graph's variables the storage of Keras variables within this block."""
    before = [v.value for v in variables]
    try:
        for v, weight in zip(variables, weights, strict=True):
            compat.set_storage(v, weight)
        yield
    finally:
        for v, value in zip(variables, before, strict=True):
            compat.set_storage(v, value)


def for_canned(optimizer) -> KerasOptimizer | None:
    """Returns the KerasOptimizer of a canned Estimator's optimizer, or None if that is not one of Keras.

    Raises:
      ConfigError: it scales the loss.
    """
    made = optimizer() if callable(optimizer) else optimizer
    if isinstance(made, keras.optimizers.LossScaleOptimizer):
        raise errors.ConfigError(
            f"optimizer={made!r}: canned Estimators compute in float32, which needs no loss scale. Give its inner "
            "optimizer."
        )
    if not isinstance(made, keras.optimizers.Optimizer):
        return None
    return KerasOptimizer((lambda: made) if callable(optimizer) else copies_of(made))


library.convert_optimizers(for_canned)
