"""Several workers on loopback: as threads of this process, or as processes of their own."""

import concurrent.futures
import contextlib
import json

import jobs
import tensorflow as tf

from tower_train import Config, host, train
from tower_train.cluster import membership
from tower_train.cluster.task import Policy, Task
from tower_train.graph import devices


def hosts(count):
    return host.free_addresses(count)


def member(there, index, *policy, leave=membership.exit_at_once, **policies):
    """A worker's membership, before it is entered; with a Policy of these values."""
    return membership.join(Task(tuple(there), index), devices.place(Config()), Policy(*policy, **policies), leave)


def train_together(train_dir, count, workload, session_hooks=None, absent=(), **options):
    """Trains with `count` workers, each in a thread of its own and with a server of its own.

    Args:
      train_dir: of all of them.
      session_hooks: {worker: hooks}.
      absent: workers that have a host and are not started.
      options: of Config.

    Returns:
      Their results, or the errors that they ended with.
    """
    there = ",".join(hosts(count))

    def work(index):
        config = Config(train_dir=str(train_dir), worker_hosts=there, task_index=index, **options)
        try:
            return train(workload, config, (session_hooks or {}).get(index, ()))
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [index for index in range(count) if index not in absent]))


class Cluster:
    """Workers in processes of their own."""

    def __init__(self, train_dir, count, **options):
        self.hosts = hosts(count)
        self._options = dict(worker_hosts=",".join(self.hosts), train_dir=train_dir) | options
        self._stack = contextlib.ExitStack()
        self.workers = {index: self.start(index) for index in range(count)}

    def start(self, index, **changes):
        words = jobs.flags(**(self._options | {"task_index": index} | changes))
        return self._stack.enter_context(jobs.Trainer(*words))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def end(self, *indices):
        """Waits for workers' ends; returns their exit statuses."""
        return [self.workers[index].process.wait(jobs.WAIT_SECS) for index in indices]

    def outputs(self):
        return [worker.output() for worker in self.workers.values()]

    def wait_for_step(self, train_dir, step):
        self.workers[0].wait_until(lambda: jobs.logged_step(train_dir) >= step)


@contextlib.contextmanager
def programs(count, module, *words):
    """Starts a program with TF_CONFIG for each of `count` workers; yields their jobs.Programs."""
    there = hosts(count)
    with contextlib.ExitStack() as stack:
        places = [{"cluster": {"worker": there}, "task": {"type": "worker", "index": i}} for i in range(count)]
        yield [stack.enter_context(jobs.Program(module, *words, TF_CONFIG=json.dumps(place))) for place in places]


def write_on_board(host, text, rows=range(2)):
    """Writes a text to rows of a chief's board, as whoever reaches its port can; OpError where there is none."""
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=2000)
    with tf.Graph().as_default(), tf.compat.v1.Session(f"grpc://{host}", config=config) as session:
        for row in rows:
            place = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=f"row/{row}", container="board")
            session.run(tf.raw_ops.AssignVariableOp(resource=place, value=text))
