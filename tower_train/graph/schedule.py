"""The learning rate as a function of examples seen, so that it does not change with the number of towers."""

import tensorflow as tf


def exponential_decay(
    initial: float, factor: float, epochs_per_decay: float, num_examples: int, examples_seen: tf.Tensor
) -> tf.Tensor:
    """Staircase decay, as tf.compat.v1.train.exponential_decay(staircase=True), counted in examples.

    initial * factor ** floor(examples_seen / decay_examples), decay_examples = floor(epochs_per_decay * num_examples).

    Args:
      initial: learning rate before the first decay.
      factor: what each decay multiplies it with.
      epochs_per_decay: epochs between decays.
      num_examples: examples an epoch.
      examples_seen: int64 scalar, examples trained on before this step.

    Returns:
      float64 scalar.
    """
    decay_examples = max(1, int(epochs_per_decay * num_examples))
    decays = tf.cast(examples_seen // decay_examples, tf.float64)
    return tf.constant(initial, tf.float64) * tf.constant(factor, tf.float64) ** decays
