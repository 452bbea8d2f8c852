"""The meaning of TensorFlow's errors of a step for the other workers."""

import tensorflow as tf

LOST_CONNECTION = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError
# Errors of a step in which another worker does not take part.
LOST_WORKER = (
    *LOST_CONNECTION, tf.errors.CancelledError, tf.errors.InternalError, tf.errors.FailedPreconditionError
)  # fmt: skip


def may_be_anothers(error: BaseException) -> bool:
    """Returns whether another worker may be behind an error: TensorFlow's, or of a session closed for that."""
    is_of_variables = isinstance(error, tf.errors.FailedPreconditionError) and not is_of_earlier_start(error)
    return isinstance(error, (tf.errors.OpError, RuntimeError)) and not is_of_variables


def is_of_earlier_start(error: tf.errors.OpError) -> bool:
    """Returns whether it is of a group of devices of an earlier start of a worker; nobody else may notice."""
    return "incarnation" in error.message


def is_of_sizes(error: BaseException) -> bool:
    """Returns whether workers gave tensors of different sizes to one operation, by either error of TensorFlow's."""
    text = error.message if isinstance(error, tf.errors.OpError) else ""
    return "Shape mismatch in the collective" in text or "Tensor Size Mismatch" in text


def is_of_another_session(error: BaseException, target: str) -> bool:
    """Returns whether a session outside of the cluster has refused operations between workers (collectives.Workers)."""
    text = error.message if isinstance(error, tf.errors.InvalidArgumentError) else ""
    return bool(target) and "/job:worker" in text and "/job:localhost" in text
