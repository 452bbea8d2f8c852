"""Given numbers instead of the stream's, for tests of random changes to examples."""

import tensorflow as tf


class GivenDraws:
    """Implements workload.Draws.

    Args:
      uniform, of_example: floating point [batch, count], what these methods return for any name.
      epochs: integers [batch].
    """

    def __init__(self, uniform, of_example=None, epochs=None):
        self._uniform, self._of_example = uniform, of_example
        self.epochs = None if epochs is None else tf.constant(epochs, tf.int64)

    def uniform(self, name, count):
        return tf.convert_to_tensor(self._uniform, tf.float32)[:, :count]

    def of_example(self, name, count):
        return tf.convert_to_tensor(self._of_example, tf.float32)[:, :count]
