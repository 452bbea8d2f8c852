"""Initial values that come from the training examples.

def inference_for(examples):
    kernels = initializers.FromExamples(examples, 5000, lambda images, labels: whitening.kernels(images))

    def inference(images, training):
        weights = tf.compat.v1.get_variable("whiten/weights", [2, 2, 3, 24], images.dtype, kernels)
"""

import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train.examples import Examples, Tensors


class FromExamples:
    """An initializer for `get_variable`: the value of a numpy function of the first examples.

    It is computed when the variable is initialised, once for all towers, and not if the variable gets its value from a
    checkpoint, from another worker, or in evaluation and export, whose graphs lack it.
    """

    def __init__(self, examples: Examples, count: int, function: Callable[[Tensors, Tensors], np.ndarray]):
        """Takes the examples of Workload.inference_for, how many of them to read, and a function: (features, labels),
        numpy arrays before any preprocessing -> the value, of the variable's shape."""
        self._examples, self._count, self._function = examples, count, function
        self._lock, self._value = threading.Lock(), None

    def __call__(self, shape, dtype=tf.float32, partition_info=None) -> tf.Tensor:
        del partition_info
        shape, dtype = tf.TensorShape(shape), tf.as_dtype(dtype)

        def compute():
            with self._lock:  # moving averages begin with it too, in other threads
                if self._value is None:
                    self._value = np.asarray(self._function(*self._examples.first(self._count)))
            return self._value.astype(dtype.as_numpy_dtype)

        with tf.device("/cpu:0"):
            return tf.ensure_shape(tf.numpy_function(compute, [], dtype), shape)
