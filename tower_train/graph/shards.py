"""The elements of a data set in its own order, divided among the workers that train together.

Workers need not communicate. Either all go through the same elements and each keeps its part of every step, which is
the order of one worker; or each reads files of its own, then those of the next worker, and so on around. So workers of
equal batches stay together however unequal their files are: N workers have seen each element N times when each has gone
around once.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import notice
from tower_train.examples import Examples, in_fixed_order

_MOST_NUMBERS = 2**17  # of a constant that is digested; larger ones are the examples themselves


def batches(examples: Examples, size: int, num_workers: int, worker: int) -> tuple[tf.data.Dataset, tf.Tensor, str]:
    """Makes the dataset of one worker's batches.

    Args:
      examples: with `elements`.
      size: examples of a batch.
      num_workers, worker: number of workers, and index of this one.

    Returns:
      The dataset; int64 scalar, the number of elements for all workers, negative if endless or unknown; a digest that
        is the same in workers with the same order, or empty.

    Raises:
      DataError: workers could not go through the same elements.
    """
    order = ""
    if examples.of_worker:
        elements = examples.of_worker(worker, num_workers)
    else:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        elements = examples.elements()
        operations = graph.get_operations()[before:]
        if _forgets_shuffles(operations):
            notice(
                f"{examples.name}: TensorFlow does not save the places of shuffles that a repeated concatenate adds. "
                "A resumed run has other orders than one that was not stopped. Shuffle after concatenate()."
            )
        if num_workers > 1:
            order = _order(examples.name, operations)
    steps = in_fixed_order(elements).batch(size, drop_remainder=True)
    if num_workers > 1 and not examples.of_worker:
        steps = steps.shard(num_workers, worker)
    return steps, tf.data.experimental.cardinality(elements), order


def note(examples: Examples, num_workers: int) -> str | None:
    """Returns a line on how several workers divide the elements, or None."""
    if num_workers == 1 or not examples.elements:
        return None
    if examples.of_worker:
        sizes = examples.worker_bytes(num_workers) if examples.worker_bytes else []
        uneven = sizes and (
            f"; as these are of {min(sizes):,} to {max(sizes):,} bytes, an example comes {num_workers} times in "
            f"{num_workers} epochs, but not once in each"
        )
        return (
            f"shards:   each of {num_workers} workers reads files of its own, then the next worker's, and so on around"
            f"{uneven if len({*sizes}) > 1 else ''}"
        )
    return (
        f"shards:   none: each of {num_workers} workers goes through all elements and keeps its part of each step; "
        "with files= it would read less"
    )


def _forgets_shuffles(operations: Sequence[tf.Operation]) -> bool:
    """Whether a dataset repeats one to which a shuffled one is concatenated: until it is read again, TensorFlow saves
    nothing of its shuffle."""
    repeated = _with_inputs(op for op in operations if "Repeat" in op.type)
    added = _with_inputs(op.inputs[1].op for op in repeated if op.type == "ConcatenateDataset")
    return any(op.type.startswith("Shuffle") and op.get_attr("reshuffle_each_iteration") for op in added)


def _with_inputs(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations and all that they depend on."""
    found, left = set(), list(operations)
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left.extend(tensor.op for tensor in op.inputs)
    return found


def _order(name: str, operations: Sequence[tf.Operation]) -> str:
    """Digests the operations of a dataset and its constants, such as seeds and lists of files, without folders, which
    may differ between machines. Raises DataError for operations that may give the elements in any order."""
    digest = hashlib.sha256()
    for op in operations:
        if "Parallel" in op.type and op.node_def.attr["deterministic"].s == b"false":
            raise errors.DataError(
                f"{name}: a transformation of its dataset has deterministic=False ({op.type}), so that workers would "
                "not agree on the order of its elements. Leave that out, or name its files with files=."
            )
        digest.update(f"{op.type} {[output.shape for output in op.outputs]}".encode())
        if op.type == "Const" and op.outputs[0].shape.num_elements() <= _MOST_NUMBERS:
            values = np.ravel(tf.make_ndarray(op.get_attr("value")))
            digest.update(str([v.rpartition(b"/")[2] if isinstance(v, bytes) else v for v in values.tolist()]).encode())
    return digest.hexdigest()[:16]
