"""The place of a tf.data iterator, kept in a variable so that a checkpoint holds it."""

import dataclasses

import tensorflow as tf

v1 = tf.compat.v1

_FAIL = 2  # tf.data.experimental.ExternalStatePolicy.FAIL: refuse state that would not be saved


@dataclasses.dataclass(frozen=True)
class IteratorState:
    """The saved state of an iterator.

    The state is what tf.data itself writes of an iterator: the place of every source, what shuffles draw next, and
    every element that is on its way (in shuffle buffers, parallel maps, prefetched), so that none is lost or repeated.

    Attributes:
      variable: string scalar, the state when `note` was last run; empty before.
      note: op that writes the state into the variable.
      resume: op that puts the iterator where the variable says, after its initializer; nothing where it is empty.
      length: int64 scalar, the elements of the whole dataset; negative where it is endless or TensorFlow cannot tell.
    """

    variable: tf.Variable
    note: tf.Operation
    resume: tf.Operation
    length: tf.Tensor


def of(iterator, length: tf.Tensor, step_size: int) -> IteratorState:
    """The state of an initializable iterator that gives batches of step_size.

    The variable's name tells the size of the batches, since some of them are part of the state.
    """
    variable = v1.get_variable(
        f"iterator/batches_of_{step_size}", [], tf.string, v1.constant_initializer(b""), trainable=False
    )
    parts = tf.nest.flatten(iterator.element_spec)
    resource = tf.raw_ops.IteratorFromStringHandleV2(
        string_handle=iterator.string_handle(), output_types=[part.dtype for part in parts],
        output_shapes=[part.shape for part in parts],
    )  # fmt: skip
    # In a string, since what reads checkpoints in Python cannot read the variants that TensorFlow saves it in.
    state = tf.io.serialize_tensor(tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_FAIL))

    def deserialize():
        parts = tf.ensure_shape(tf.io.parse_tensor(variable, tf.variant), [None])
        return tf.group(tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=parts))

    resume = tf.cond(tf.equal(variable, b""), tf.no_op, deserialize)
    return IteratorState(variable, variable.assign(state).op, resume, length)
