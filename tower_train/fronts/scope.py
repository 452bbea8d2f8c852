"""A scope in which Keras layers compute, and what they assign is noted."""

from collections.abc import Iterable

import keras
import tensorflow as tf


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
        self.assigned[id(variable)] = update
        before = self.get_current_value(variable)
        is_of_weight = before is not None and variable.trainable
        super().add_update((variable, _assigned(tf.convert_to_tensor(before), value) if is_of_weight else value))


@tf.custom_gradient
def _assigned(before: tf.Tensor, value: tf.Tensor):
    """Returns a value assigned to a weight; its gradient goes to the weight."""
    return tf.identity(value), lambda grad: (grad, None)
