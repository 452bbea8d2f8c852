"""A program in Horovod's words, without a hook and with a plain session: python horovod_program.py FOLDER

What each operation makes of values that are formulas of the rank goes into FOLDER/RANK.npz. In the end the workers give
one operation tensors of different sizes.
"""

import sys

import numpy as np
import tensorflow as tf
from session_program import seeded

import tower_train
import tower_train.horovod as hvd

v1 = tf.compat.v1
REDUCED = (tf.uint8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
SENT = (*REDUCED, tf.bool, tf.uint32)


def of_rank(dtype, rank, shape=(2, 3)):
    """Numbers that each dtype holds, others in each worker."""
    return tf.cast(tf.reshape(tf.range(np.prod(shape)), shape) % 2 + rank, dtype)


def operations(rank):
    yield from ((f"sum {d.name}", hvd.allreduce(of_rank(d, rank), average=False)) for d in REDUCED)
    yield from ((f"mean {d.name}", hvd.allreduce(of_rank(d, 2 * rank))) for d in REDUCED)
    yield from ((f"rows {d.name}", hvd.allgather(of_rank(d, rank, [rank + 1, 2]))) for d in SENT)
    yield from ((f"sent {d.name}", hvd.broadcast(of_rank(d, rank), 1)) for d in SENT)
    own = tf.constant([[1.0 + rank]] * (rank + 1), tf.float64)
    yield "rows by name", hvd.allgather(own, name="mine")
    yield "slices", hvd.allreduce(tf.IndexedSlices(own, tf.range(rank + 1), [3, 1]))
    yield "compressed", hvd.allreduce(tf.constant([1.0, 1 / 3]), compression=hvd.Compression.bf16)


def optimizers(cluster):
    """{name: gradient} as optimizers see them: dense of sparse, of two towers, of halves, of a scaled loss."""
    half = v1.get_variable("half", [2], tf.float16, v1.zeros_initializer())
    rows = v1.get_variable("rows", [3], tf.float32, seeded(hvd.rank()))
    unused = v1.get_variable("unused", [1])
    sgd = v1.train.GradientDescentOptimizer(1.0)
    optimizer = hvd.DistributedOptimizer(sgd, sparse_as_dense=True, compression=hvd.Compression.fp16)
    loss = tf.reduce_sum(half * tf.constant([60000.0, 1.0], tf.float16))
    loss += tf.cast(tf.reduce_sum(tf.gather(rows, [0, hvd.rank() + 1])), tf.float16)
    _, (of_rows, _), (of_unused, _) = optimizer.compute_gradients(loss, [half, rows, unused])
    assert of_unused is None and not isinstance(of_rows, tf.IndexedSlices)
    plain = hvd.DistributedOptimizer(sgd, backward_passes_per_step=1, gradient_predivide_factor=1.0)
    towers = []
    for i, device in enumerate(cluster.devices):
        with tf.device(device):
            towers.append(sgd.compute_gradients(tf.reduce_sum(rows * (10.0 * hvd.rank() + i)), [rows]))
    [(of_towers, _)] = plain.average(tower_train.average_gradients(towers))
    [(of_half, _)] = plain.compute_gradients(tf.reduce_sum(half * tf.constant([60000.0, 1.0], tf.float16)), [half])
    scaled = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(plain, 128.0)
    [(of_scaled, _)] = scaled.compute_gradients(tf.reduce_sum(rows) * hvd.rank(), [rows])
    return {"dense": of_rows, "towers": of_towers, "half": of_half, "scaled": of_scaled}


def main(folder):
    cluster = hvd.init(num_gpus=2)
    assert hvd.is_initialized() and hvd.init() is cluster and hvd.local_rank() == hvd.rank() == cluster.rank
    assert hvd.local_size() == hvd.size() == cluster.size and len(cluster.devices) == 2
    with tf.Graph().as_default():
        made = dict(operations(hvd.rank()))
        gradients = optimizers(cluster)
        config = hvd.session_config()
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        place = v1.placeholder(tf.float32, [None])
        mean = hvd.allreduce(place)
        init, sent = v1.global_variables_initializer(), hvd.broadcast_global_variables(1)
        with v1.Session(hvd.target(), config=config) as session:
            session.run(init)
            [rows] = [each for each in v1.global_variables() if each.op.name == "rows"]
            before = session.run(rows)
            session.run(sent)
            values = session.run(made | gradients) | {"before": before, "after": session.run(rows)}
            storable = {k: v.astype(np.float32) if v.dtype.name == "bfloat16" else v for k, v in values.items()}
            np.savez(f"{folder}/{hvd.rank()}.npz", **storable)
            session.run(mean, {place: [1.0] * (hvd.rank() + 1)})


if __name__ == "__main__":
    main(*sys.argv[1:])
