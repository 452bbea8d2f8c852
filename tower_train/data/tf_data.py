"""A user's tf.data.Dataset as `Examples`, in its own order.

The checkpoint holds the state of its iterator, including its shuffle buffers. Data that can be fetched by index needs
neither: `Examples.from_arrays`, `tf_records`.

Several workers take the elements in the order of one, each its part of every step. So all of them go through the whole
dataset.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples

v1 = tf.compat.v1


def examples(
    name: str,
    make: Callable[[], tf.data.Dataset],
    num_examples: int | None = None,
    class_names: Sequence[str] = (),
    fingerprint: str = "",
) -> Examples:
    """Makes examples of the elements of a dataset.

    Args:
      name: name of the data set in logs.
      make: called inside a graph; returns a dataset of (features, label), one example each (`.unbatch()` splits
        batches), shuffled if wanted. For training it must not end: `.repeat()`. For testing it ends.
      num_examples: number of examples, of a dataset that repeats them per epoch. None: as many as TensorFlow finds.
      class_names: names of labels 0, 1, ...; empty if labels are not classes.
      fingerprint: changes when the data changes; of what make does, only the elements' shapes and types are compared.

    Raises:
      DataError: num_examples is missing and TensorFlow cannot count.
      GraphError: make returns something else.
    """
    examples = Examples(
        name,
        1 if num_examples is None else num_examples,
        open=None,
        class_names=tuple(class_names),
        elements=make,
    )
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        dataset = examples.opened_elements()
        num_examples = num_examples or _count(name, dataset)
    digest = hashlib.sha256(f"{dataset.element_spec} {num_examples} {fingerprint}".encode()).hexdigest()[:16]
    return dataclasses.replace(examples, num_examples=num_examples, fingerprint=digest)


def _count(name: str, dataset: tf.data.Dataset) -> int:
    with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        count = int(session.run(tf.data.experimental.cardinality(dataset)))
    if count < 0:
        why = "it repeats" if count == tf.data.INFINITE_CARDINALITY else "TensorFlow cannot count this dataset"
        raise errors.DataError(f"{name}: {why}, so say how many examples make an epoch with num_examples=.")
    return count
