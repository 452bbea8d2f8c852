"""TensorFlow's choice of kernels: those that repeat to the bit, those that round to fewer digits."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors


def choose(deterministic: bool, tensor_float_32: bool | None) -> None:
    """Chooses kernels for all that this process builds and runs from now on.

    Args:
      deterministic: whether GPUs are to repeat to the bit, until the process ends.
      tensor_float_32: whether GPUs may round the factors of float32 products to 10 bits, which is several times as fast
        (Ampere and later); None leaves TensorFlow's setting, by default True.
    """
    if tensor_float_32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(tensor_float_32)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


@contextlib.contextmanager
def missing_named() -> Iterator[None]:
    """Names an operation without a kernel of the chosen kind in a GraphError, within this block."""
    try:
        yield
    except tf.errors.UnimplementedError as error:
        if "determinis" not in error.message.lower():
            raise
        which = f"{error.op.name} ({error.op.type})" if error.op is not None else "an operation"
        raise errors.GraphError(
            f"--deterministic: {which} has no kernel on its device that repeats to the bit ({errors.reason(error)}). "
            "Leave the option out, or use another operation."
        ) from error
