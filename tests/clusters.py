"""Several workers on loopback: as threads of this process, or as processes of their own."""

import concurrent.futures
import contextlib
import json

import jobs
import tensorflow as tf

from tower_train import Config, host, train
from tower_train.cluster import membership, store
from tower_train.cluster.task import Policy, Task
from tower_train.graph import devices

# Options of a worker's run, that normalises by tower, clips and averages in float64; it saves in the end.
NORM = jobs.TOY | dict(workload="norm_workload", dtype="float64", num_gpus=1, batch_size=3, learning_rate=0.05)
NORM |= dict(clip_gradients=0.5, batch_norm="tower", log_every_steps=1, save_every_steps=0, keep_checkpoints=0)


hosts = host.free_addresses


def member(there, index, *policy, leave=lambda error: None, **policies):
    """A worker's membership, before it is entered; with a Policy of these values."""
    return membership.join(Task(tuple(there), index), devices.place(Config()), Policy(*policy, **policies), leave)


def train_together(train_dir, count, workload, after_step=None, absent=(), **options):
    """Trains with `count` workers, each a thread with a server of its own; returns their results, or their errors.

    after_step: {worker: function}. absent: workers that have a host and are not started.
    """
    there = ",".join(hosts(count))

    def work(index):
        config = Config(train_dir=str(train_dir), worker_hosts=there, task_index=index, **options)
        try:
            return train(workload, config, after_step=(after_step or {}).get(index))
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [index for index in range(count) if index not in absent]))


@contextlib.contextmanager
def programs(count, module, *words):
    """Starts a program with TF_CONFIG for each of `count` workers; yields their jobs.Programs."""
    there = hosts(count)
    with contextlib.ExitStack() as stack:
        places = [{"cluster": {"worker": there}, "task": {"type": "worker", "index": i}} for i in range(count)]
        yield [stack.enter_context(jobs.Program(module, *words, TF_CONFIG=json.dumps(place))) for place in places]


def write_to_store(host, text, rows=range(2)):
    """Writes a text to rows of a chief's store, as anyone who reaches its port can; OpError if there is none."""
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=2000)
    with tf.Graph().as_default(), tf.compat.v1.Session(f"grpc://{host}", config=config) as session:
        for row in rows:
            session.run(store.place(f"row/{row}", text)[0])
