"""A tf.data.Dataset of the user's own as `Examples`, in the order in which it gives them.

The order is the dataset's own, and the state of its iterator goes into the checkpoint, with what its shuffle buffers
hold. Data that can be fetched by index needs neither: `Examples.from_arrays`, `tf_records`.

Several workers take the elements in the order in which one would, each its part of every step. So all of them go
through the whole dataset, unless they are given shards of it.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples, Shard

v1 = tf.compat.v1


def examples(
    name: str,
    make: Callable[..., tf.data.Dataset],
    num_examples: int | None = None,
    class_names: Sequence[str] = (),
    fingerprint: str = "",
    parallel_steps: int | None = None,
) -> Examples:
    """Makes examples of the elements of a dataset.

    Args:
      name: what the data set is called in logs.
      make: called inside a graph; returns a dataset of (features, label), one example each (`.unbatch()` takes batches
        apart), shuffled if it is to be. For training it must not end: `.repeat()`. For testing it ends. If make has a
        parameter without a default value, it gets a `Shard` and returns the elements of that shard, each once, such as
        those of the files paths[shard.index :: shard.count]. A worker trains on its own shard, then on the next
        worker's, and so on around; a shard that it repeats it never leaves.
      num_examples: how many there are; of a dataset that repeats them, how many make an epoch. None: as many as
        TensorFlow finds in the dataset.
      class_names: what label i means; empty where labels are not classes.
      fingerprint: changes when the data changes; of what make does, only the elements' shapes and types are compared.
      parallel_steps: for how many steps the workload's own preprocessing runs at the same time; None: two.

    Raises:
      DataError: make returns something else, or num_examples is missing and TensorFlow cannot tell it.
    """
    shard = make if _takes_shard(make) else None
    elements = functools.partial(make, Shard(0, 1)) if shard else make
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        dataset = elements()
        if not isinstance(dataset, tf.data.Dataset):
            raise errors.DataError(f"{name}: got {type(dataset).__name__}; make must return a tf.data.Dataset.")
        spec = dataset.element_spec
        if not (isinstance(spec, tuple) and len(spec) == 2):
            raise errors.DataError(
                f"{name}: its elements are {spec}; they must be pairs, (features, label) of one example. Put several "
                "features into a dict or a tuple."
            )
        if num_examples is None:
            num_examples = _count(name, dataset)
    if num_examples < 1:
        raise errors.DataError(f"{name}: num_examples is {num_examples}; there must be at least one example.")
    digest = hashlib.sha256(f"{spec} {num_examples} {fingerprint}".encode()).hexdigest()[:16]
    return Examples(
        name, num_examples, None, digest, tuple(class_names), parallel_steps=parallel_steps, elements=elements,
        shard=shard,
    )  # fmt: skip


def _takes_shard(make: Callable) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of no Python function
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return any(each.kind in positional and each.default is each.empty for each in parameters)


def _count(name: str, dataset: tf.data.Dataset) -> int:
    with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        found = int(session.run(tf.data.experimental.cardinality(dataset)))
    if found < 0:
        why = "it repeats" if found == tf.data.INFINITE_CARDINALITY else "TensorFlow cannot count this dataset"
        raise errors.DataError(f"{name}: {why}, so say how many examples make an epoch with num_examples=.")
    return found
