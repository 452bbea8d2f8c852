"""What Keras' variables are worth in a graph: initial values and the states of their random numbers."""

import keras
import tensorflow as tf

_FAR_APART = 0x9E3779B9  # 2**32 over the golden ratio: its multiples share no neighbourhood (Knuth, vol. 3, 6.4)


def begins_with(value):
    """An initializer that does not put the value into the graph, which is written to disk with each checkpoint.

    Args:
      value: numpy array; None for zeros.
    """

    def initializer(shape, dtype=None, partition_info=None):
        if value is None:
            return tf.zeros(shape, dtype)
        return tf.ensure_shape(tf.numpy_function(lambda: value, [], tf.as_dtype(value.dtype), stateful=False), shape)

    return initializer


def is_seed(variable: keras.Variable) -> bool:
    """Whether it is the state of a layer's random numbers, such as those of dropout."""
    return variable.name == "seed_generator_state"


def tower_seeds(variables: list[keras.Variable], values: list[tf.Tensor], index: int) -> dict[int, tf.Tensor]:
    """{id of a seed's variable: its value for a replica}: replicas must not draw the same dropout masks.

    Args:
      variables, values: a model's, seeds or not.
      index: of the replica; the first one has the seeds that the model would have alone.
    """
    seeds = [(v, value) for v, value in zip(variables, values, strict=True) if is_seed(v)]
    if not index:
        return {}
    return {id(v): value + tf.constant([index * _FAR_APART, 0], value.dtype) for v, value in seeds}
