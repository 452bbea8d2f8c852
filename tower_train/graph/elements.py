"""Examples in an order of their own: the iterator's state in the checkpoint."""

import dataclasses

import tensorflow as tf

from tower_train.examples import Examples, in_fixed_order

v1 = tf.compat.v1

_FAIL = 2  # tf.data.experimental.ExternalStatePolicy.FAIL: refuse state that would not be saved


@dataclasses.dataclass(frozen=True)
class IteratorState:
    """The saved state of an iterator, written by tf.data itself: the position of every source, the next draws of
    shuffles, and every element on its way (in shuffle buffers, parallel maps, prefetched), so none is lost or repeated.
    """

    write: tf.Operation  # writes the state into the variable that is saved
    resume: tf.Operation  # moves the iterator to the saved state, after its initializer; nothing if that is empty
    length: tf.Tensor  # int64 scalar, the elements of the whole dataset; negative if endless or unknown


def iterator_state(iterator, batch: int, is_preprocessed: bool, length: tf.Tensor) -> IteratorState:
    """Returns the state of an iterator over batches of this size. length: as in IteratorState."""
    # The state holds some batches, so the name tells their size, and whether they are preprocessed.
    name = f"iterator/batches_of_{batch}{'' if is_preprocessed else '_not_distorted'}"
    variable = v1.get_variable(name, [], tf.string, v1.constant_initializer(b""), trainable=False)
    parts = tf.nest.flatten(iterator.element_spec)
    resource = tf.raw_ops.IteratorFromStringHandleV2(
        string_handle=iterator.string_handle(),
        output_types=[part.dtype for part in parts],
        output_shapes=[part.shape for part in parts],
    )
    # As a string, since Python's checkpoint readers cannot read TensorFlow's variants.
    state = tf.io.serialize_tensor(tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_FAIL))

    def put_back() -> tf.Operation:
        saved = tf.ensure_shape(tf.io.parse_tensor(variable, tf.variant), [None])
        return tf.group(tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=saved))

    resume = tf.cond(tf.equal(variable, b""), tf.no_op, put_back)
    return IteratorState(variable.assign(state).op, resume, length)


def batches(examples: Examples, size: int) -> tuple[tf.data.Dataset, tf.Tensor]:
    """Makes the dataset of batches of `size` examples; also returns the number of elements, int64 scalar, negative if
    endless or unknown."""
    elements = examples.opened_elements()
    steps = in_fixed_order(elements).batch(size, drop_remainder=True)  # of one size, so that plain means stay right
    return steps, tf.data.experimental.cardinality(elements)
