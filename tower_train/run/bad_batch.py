"""The batch of a step, made again from its place in the stream and written to a file."""

import os
import pathlib
import zipfile

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph import draws, stream
from tower_train.graph.layout import Layout
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


def write(
    train_dir: pathlib.Path, workload: Workload, examples: Examples, seed: int, split: Layout, step: int,
    first: int,
) -> str:  # fmt: skip
    """Writes the batch of a step, from its first position in the stream, to bad_batch-STEP.npz; returns its path or the
    failure.

    The file holds `positions` and `indices`, int64 [global batch], and the towers' inputs after distortion, joined in
    their order: `features` and `labels`, or features_0, features_1, ... for several tensors.
    """
    path = train_dir / f"bad_batch-{step}.npz"
    temporary = train_dir / f".bad_batch-{step}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **_arrays(workload, examples, seed, split, first))
        os.replace(temporary, path)
    except (OSError, tf.errors.OpError, zipfile.BadZipFile) as error:
        temporary.unlink(missing_ok=True)
        return f"{path}, which failed ({errors.reason(error)})"
    return str(path)


def _arrays(workload: Workload, examples: Examples, seed: int, split: Layout, first: int) -> dict[str, np.ndarray]:
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        again = stream.training_stream(workload, examples, seed, tf.constant(first, tf.int64), split)
        positions = first + tf.range(split.worker_batch, dtype=tf.int64)
        fetches = positions, draws.shuffled_indices(positions, examples.num_examples, seed), again.batches
        with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
            session.run([v1.tables_initializer(), again.initializer])
            positions, indices, batches = session.run(fetches)
    arrays = {"positions": positions, "indices": indices}
    for i, name in enumerate(("features", "labels")):
        tensors = [
            np.concatenate(towers) for towers in zip(*(tf.nest.flatten(batch[i]) for batch in batches), strict=True)
        ]
        arrays |= {name if len(tensors) == 1 else f"{name}_{j}": tensor for j, tensor in enumerate(tensors)}
    return arrays
