"""Custom getters of a network's variables: their dtype and their initial values."""

import copy
import hashlib

import tensorflow as tf

v1 = tf.compat.v1


def variable_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of variables, gradients and losses: that of the arithmetic, but never below float32."""
    # a weight's change in a step is often too small for 16 bits (Micikevicius et al. 2018, "Mixed precision training")
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def kept_in_full_precision(getter, name, shape=None, dtype=tf.float32, initializer=None, *args, **kwargs):
    """Gets a float32 variable, cast to the lower dtype that the network asks for; a custom getter."""
    dtype = tf.as_dtype(dtype)
    if initializer is not None and not callable(initializer):  # a value, whose dtype is that of the variable
        value = tf.convert_to_tensor(initializer)
        dtype, initializer = value.dtype, tf.cast(value, variable_dtype(value.dtype))
    variable = getter(name, shape, variable_dtype(dtype), initializer, *args, **kwargs)
    if variable.dtype.base_dtype == dtype:
        return variable
    return tf.cast(variable, dtype)


def seeded(seed: int):
    """Returns a custom getter that seeds initializers by name: default seeds depend on the number of ops and towers."""

    def with_seed(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
        if initializer is None and tf.as_dtype(dtype).is_floating:
            initializer = v1.glorot_uniform_initializer()  # get_variable's own default for floating-point variables
        if isinstance(initializer, type):
            initializer = initializer()
        is_keras = getattr(initializer, "_init_seed", 0) is None
        if is_keras or getattr(initializer, "seed", 0) is None:
            # by name, so that a new layer does not change the others' weights
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            number = int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
            if is_keras or hasattr(initializer, "_random_generator"):  # they have made numbers of a seed already
                initializer = type(initializer).from_config(initializer.get_config() | {"seed": number})
            else:
                initializer = copy.copy(initializer)  # the caller may share it between variables
                initializer.seed = number
        return getter(name, shape, dtype, initializer, *args, **kwargs)

    return with_seed
