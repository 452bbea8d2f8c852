"""Examples in an order of their own: their division among workers, and the iterator's state in the checkpoint.

Workers need not communicate: all go through the same elements, and each keeps its part of every step, which is the
order of one worker.
"""

import dataclasses
import re
from collections.abc import Sequence

import tensorflow as tf

from tower_train.examples import Examples, in_fixed_order
from tower_train.graph.layout import Layout

v1 = tf.compat.v1

_FAIL = 2  # tf.data.experimental.ExternalStatePolicy.FAIL: refuse state that would not be saved
_NAME = re.compile(r"iterator/(?:worker_\d+_of_(\d+)/)?batches_of_\w+")


@dataclasses.dataclass(frozen=True)
class IteratorState:
    """The saved state of an iterator, written by tf.data itself: the position of every source, the next draws of
    shuffles, and every element on its way (in shuffle buffers, parallel maps, prefetched), so none is lost or repeated.
    """

    # over workers, string scalars, the states when `write` was last run; empty before. Not make_saveable_from_iterator,
    # since workers send theirs to the chief
    variables: Sequence[tf.Variable]
    worker: int  # index of this process
    write: tf.Operation  # writes the state into this worker's variable
    resume: tf.Operation  # moves the iterator to the saved state, after its initializer; nothing if that is empty
    length: tf.Tensor  # int64 scalar, the elements of the whole dataset; negative if endless or unknown


def saved_by(variable: str) -> int | None:
    """Returns the number of workers that saved a state under a variable's name; None if it is no iterator's."""
    name = _NAME.fullmatch(variable)
    return name and int(name[1] or 1)


def iterator_state(iterator, layout: Layout, is_preprocessed: bool, length: tf.Tensor) -> IteratorState:
    """Returns the state of a worker's iterator. length: as in IteratorState."""
    # The state holds some batches, so the name tells their size, and whether they are preprocessed.
    name, worker = f"batches_of_{layout.worker_batch}{'' if is_preprocessed else '_not_distorted'}", layout.worker
    names = [f"iterator/{name}"]
    if layout.num_workers > 1:
        names = [f"iterator/worker_{i}_of_{layout.num_workers}/{name}" for i in range(layout.num_workers)]
    variables = [v1.get_variable(name, [], tf.string, v1.constant_initializer(b""), trainable=False) for name in names]
    variable, parts = variables[worker], tf.nest.flatten(iterator.element_spec)
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
    return IteratorState(variables, worker, variable.assign(state).op, resume, length)


def batches(examples: Examples, size: int, num_workers: int, worker: int) -> tuple[tf.data.Dataset, tf.Tensor]:
    """Makes the dataset of one worker's batches of `size` examples.

    Returns:
      The dataset; int64 scalar, the number of elements for all workers, negative if endless or unknown.
    """
    elements = examples.opened_elements()
    steps = in_fixed_order(elements).batch(size, drop_remainder=True)  # of one size, so that plain means stay right
    if num_workers > 1:
        steps = steps.shard(num_workers, worker)
    return steps, tf.data.experimental.cardinality(elements)
