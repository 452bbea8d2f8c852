"""The position of a tf.data iterator, kept in a variable for the checkpoint."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.graph.devices import HOST
from tower_train.graph.staging import Source, Staged

v1 = tf.compat.v1

_FAIL = 2  # tf.data.experimental.ExternalStatePolicy.FAIL: refuse state that would not be saved
_OF_STRINGS = b"\x08\x07"  # begins a serialized tensor of strings: field 1 of TensorProto, dtype, is DT_STRING
_NAME = re.compile(r"iterator/(?:worker_\d+_of_(\d+)/)?batches_of_\w+")
_ON_THEIR_WAY = "it was saved with batches on their way to GPUs, so go on on GPUs"


@dataclasses.dataclass(frozen=True)
class IteratorState:
    """The saved state of an iterator.

    tf.data itself writes the state: the position of every source, the next draws of shuffles, and every element on its
    way (in shuffle buffers, parallel maps, prefetched), so that none is lost or repeated. Batches that wait on their
    devices have left the iterator, and are saved beside it.

    Attributes:
      variables: over workers, string scalars, the states when `note` was last run; empty before.
      worker: index of this process.
      note: op that writes the state into this worker's variable.
      resume: op that moves the iterator to the saved state, after its initializer; nothing if it is empty.
      length: int64 scalar, the elements of the whole dataset; negative if endless or unknown.
    """

    variables: Sequence[tf.Variable]
    worker: int
    note: tf.Operation
    resume: tf.Operation
    length: tf.Tensor


def names(batch: int, is_preprocessed: bool, num_workers: int) -> list[str]:
    """Returns the variables' names, over workers.

    They contain the size of a worker's batches, and whether these are preprocessed, since the state holds some of them.
    """
    name = f"batches_of_{batch}{'' if is_preprocessed else '_not_distorted'}"
    if num_workers == 1:
        return [f"iterator/{name}"]
    return [f"iterator/worker_{worker}_of_{num_workers}/{name}" for worker in range(num_workers)]


def saved_by(variable: str) -> int | None:
    """Returns the number of workers that saved a state under a variable's name; None if it is no iterator's."""
    found = _NAME.fullmatch(variable)
    return found and int(found[1] or 1)


def of(source: Source, names: Sequence[str], worker: int, staged: Staged | None = None) -> IteratorState:
    """Returns the state of a worker's iterator and of its batches that wait on devices. names: over workers."""
    variables = [v1.get_variable(name, [], tf.string, v1.constant_initializer(b""), trainable=False) for name in names]
    variable, iterator = variables[worker], source.iterator
    parts = tf.nest.flatten(iterator.element_spec)
    resource = tf.raw_ops.IteratorFromStringHandleV2(
        string_handle=iterator.string_handle(), output_types=[part.dtype for part in parts],
        output_shapes=[part.shape for part in parts],
    )  # fmt: skip
    # As a string, since Python's checkpoint readers cannot read TensorFlow's variants.
    state = tf.io.serialize_tensor(tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_FAIL))

    def deserialize(serialized: tf.Tensor) -> tf.Operation:
        parts = tf.ensure_shape(tf.io.parse_tensor(serialized, tf.variant), [None])
        return tf.group(tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=parts))

    has_batches = tf.equal(tf.strings.substr(variable, 0, len(_OF_STRINGS)), _OF_STRINGS)

    def put_back() -> tf.Operation:
        if staged:
            return tf.cond(has_batches, *_put_back(variable, deserialize, source, staged))
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(has_batches), [_ON_THEIR_WAY])]):
            return deserialize(tf.identity(variable))

    if staged:
        state = tf.cond(staged.waiting, lambda: _with_batches(state, staged), lambda: state)
    resume = tf.cond(tf.equal(variable, b""), tf.no_op, put_back)
    return IteratorState(variables, worker, variable.assign(state).op, resume, source.length)


def _with_batches(state: tf.Tensor, staged: Staged) -> tf.Tensor:
    """Joins the state of an iterator and the batches that have left it, so that the number of towers may change."""
    with tf.device(HOST):
        whole = [tf.concat(towers, axis=0) for towers in zip(*map(tf.nest.flatten, staged.batches), strict=True)]
        return tf.io.serialize_tensor(tf.stack([state, *map(tf.io.serialize_tensor, whole)]))


def _put_back(
    variable: tf.Variable, deserialize: Callable, source: Source, staged: Staged
) -> tuple[Callable, Callable]:
    """Returns functions that restore an iterator from the variable, and on devices the saved or else the next
    batches."""

    def saved() -> tf.Operation:
        shapes = [tf.TensorShape([None]).concatenate(t.shape[1:]) for t in tf.nest.flatten(staged.batches[0])]
        count = 1 + len(shapes)
        state, *whole = tf.unstack(tf.ensure_shape(tf.io.parse_tensor(variable, tf.string), [count]))
        dtypes = [t.dtype for t in tf.nest.flatten(staged.batches[0])]
        parsed = [
            tf.ensure_shape(tf.io.parse_tensor(one, dtype), shape)
            for one, dtype, shape in zip(whole, dtypes, shapes, strict=True)
        ]
        batches = source.divided(tf.nest.pack_sequence_as(staged.batches[0], parsed))
        return tf.group(deserialize(state), staged.put(batches))

    def next_ones() -> tf.Operation:
        with tf.control_dependencies([deserialize(variable)]):
            return staged.put(source.take())

    return saved, next_ones
