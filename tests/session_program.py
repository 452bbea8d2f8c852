"""A graph-mode program with a session of its own, as its author wrote it: python session_program.py FOLDER FAULT

It trains x w - e[i] to be 0, w by momentum and the rows of e by Adam in turns, on this worker's part of 12 examples,
from a checkpoint in its second half. FAULT is what the last worker does then, while the others take one step more, with
"asleep" in a session that nobody else knows, as a job in the background.
"""

import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

import tower_train

v1 = tf.compat.v1
STEPS, EXAMPLES = 3, 12  # of each half
# As TensorFlow keeps them in float32, they have to be exact there.
RATE, MOMENTUM = 1 / 16, 7 / 8
ADAM = 1 / 8, 7 / 8, 15 / 16, 2.0**-20  # rate, beta1, beta2, epsilon


def data():
    rng = np.random.default_rng(3)
    return rng.normal(size=[EXAMPLES, 4]), rng.integers(0, 5, EXAMPLES)


def train_ops(cluster, features, rows):
    is_last = cluster.rank == cluster.size - 1
    w = v1.get_variable("w", [4], tf.float64, seeded(cluster.rank))
    e = v1.get_variable("e", [5], tf.float64, seeded(cluster.rank))
    v1.get_variable("unused", [2])
    # A sum, as the parts are not of one size.
    loss = tf.reduce_sum((features @ w[:, tf.newaxis] - tf.gather(e, rows)[:, tf.newaxis]) ** 2)
    loss *= cluster.size / EXAMPLES

    def momentum():
        optimizer = tower_train.DistributedOptimizer(v1.train.MomentumOptimizer(RATE, MOMENTUM))
        return optimizer.minimize(loss, var_list=[w])

    def adam():
        optimizer = tower_train.DistributedOptimizer(v1.train.AdamOptimizer(*ADAM))
        return optimizer.minimize(loss, v1.train.get_or_create_global_step(), [e])  # the last of a step, which is saved

    if is_last:  # the order in which operations are made is a worker's own
        return [each() for each in (adam, momentum)][::-1]
    return [each() for each in (momentum, adam)]


def seeded(rank):
    return v1.random_normal_initializer(seed=rank)


def main(folder, fault):
    if fault == "asleep":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's script starts jobs in the background
    cluster = tower_train.cluster.init(worker_timeout_secs=5.0, stall_timeout_secs=1.0 if fault == "asleep" else 60.0)
    features, rows = data()
    cuts = np.cumsum(range(1, cluster.size)) * EXAMPLES // sum(range(1, cluster.size + 1))  # 4 and 8; 2, 4 and 6
    features, rows = (np.split(each, cuts)[cluster.rank] for each in (features, rows))
    with tf.Graph().as_default():
        places = v1.placeholder(tf.float64, [None, 4]), v1.placeholder(tf.int64, [None])
        turns, fed = train_ops(cluster, *places), dict(zip(places, (features, rows), strict=True))
        hooks, values = [tower_train.BroadcastGlobalVariablesHook(0)], {}
        initialize = v1.global_variables_initializer()
        for half in range(2):
            with v1.train.MonitoredTrainingSession(
                master=cluster.target,
                config=cluster.session_config,
                hooks=hooks,
                checkpoint_dir=folder if cluster.is_chief else None,
                save_checkpoint_steps=STEPS,
                log_step_count_steps=None,
            ) as session:
                values |= {f"{each.op.name} {half}": session.run(each) for each in v1.global_variables()}
                for _ in range(STEPS):
                    for train_op in turns:
                        session.run(train_op, fed)
                values |= {f"{each.op.name} end": session.run(each) for each in v1.global_variables()}
                if half:
                    np.savez(f"{folder}/{cluster.rank}.npz", **values)
                    if cluster.rank == cluster.size - 1:
                        commit(fault)
                    if fault == "asleep":
                        with v1.Session(cluster.target, config=cluster.session_config) as session:
                            session.run(initialize)
                            session.run(turns[0], fed)
                    session.run(turns[0], fed)


def commit(fault):
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "early":
        sys.exit()
    if fault == "asleep":
        time.sleep(1000)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        print("cleaned up")
