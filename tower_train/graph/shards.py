"""The elements of a data set in an order of its own, shared out among the workers that train together.

Nothing is told from worker to worker. Either all go through the same elements and each keeps its part of every step,
which is the order of one worker; or each reads a shard of its own, then the next worker's, and so on around. With such
shards workers of equal batches stay together however unequal their shards are: N workers have seen each element N times
when each has gone around once.
"""

import functools

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples, Shard, in_fixed_order


def batches(examples: Examples, size: int, num_workers: int, worker: int) -> tuple[tf.data.Dataset, tf.Tensor]:
    """Makes the dataset of one worker's batches.

    Args:
      examples: with `elements`.
      size: examples of a batch.
      num_workers, worker: which of how many it is for.

    Returns:
      The dataset, and int64 scalar, how many elements there are for all workers; negative where they are endless or
      TensorFlow cannot tell.

    Raises:
      DataError: workers could not go through the same elements.
    """
    if examples.shard:
        own_first = [Shard((worker + i) % num_workers, num_workers) for i in range(num_workers)]
        elements = functools.reduce(tf.data.Dataset.concatenate, map(examples.shard, own_first)).repeat()
    else:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        elements = examples.elements()
        if num_workers > 1:
            _check_order(examples.name, before)
    steps = in_fixed_order(elements).batch(size, drop_remainder=True)
    if num_workers > 1 and not examples.shard:
        steps = steps.shard(num_workers, worker)
    return steps, tf.data.experimental.cardinality(elements)


def note(examples: Examples, num_workers: int) -> str | None:
    """A line on how several workers share the elements; None where there is nothing to say."""
    if num_workers == 1 or not examples.elements:
        return None
    if examples.shard:
        return f"shards:   each of {num_workers} workers reads its own one, then the next worker's, and so on around"
    return (
        f"shards:   none: each of {num_workers} workers goes through all elements and keeps its part of each step; "
        "make(shard) would read less"
    )


def _check_order(name: str, first: int) -> None:
    """Raises DataError if a dataset whose operations are those from `first` on may give its elements in any order."""
    for op in tf.compat.v1.get_default_graph().get_operations()[first:]:
        if op.node_def.attr["deterministic"].s == b"false":
            raise errors.DataError(
                f"{name}: a transformation of its dataset has deterministic=False ({op.type}), so that workers would "
                "not agree on the order of its elements. Leave that out, or let make take a shard."
            )
