"""The workers that train one Keras model together, with their comparisons, gathers, broadcasts and means.

Keras' steps run where the program has begun TensorFlow, long before it is known that there are other workers; then
collective operations are no longer possible. So they run in a session on the worker's server, which the step calls.
"""

import functools
import json
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster import program
from tower_train.cluster.task import find_task
from tower_train.cluster.watchdog import MeansWatchdog
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

SEED = (
    "Give shuffles and generators a seed, as in dataset.shuffle(1000, seed=1), or call keras.utils.set_random_seed "
    "before the data are made."
)
_LOOK_SECS = 1.0
_WORD = np.dtype(np.int64)  # messages are sent in words of this type
# Groups and instances of this module's collective operations, apart from those of other sessions of the program.
_LENGTHS, _MESSAGES, _BROADCASTS = 1001, 1002, 1003
_FIRST_MEAN = 2 * 10**6


class Workers:
    """This process among the workers that train one model together, all of which must make the same calls.

    Args:
      cluster: this process's.

    Attributes:
      rank, size, is_chief: as of the cluster.
      failure: the error that ended an exchange, if one did.
    """

    def __init__(self, cluster: program.Cluster):
        self.rank, self.size, self.is_chief = cluster.rank, cluster.size, cluster.is_chief
        self._series, self._batch = "", 0
        self.failure: errors.UserError | None = None
        self._membership, self._lock = cluster.membership, threading.Lock()
        self._graph = tf.Graph()
        self._session = v1.Session(cluster.target, self._graph, cluster.session_config)
        self._membership.session_opened(self._session)
        with self._graph.as_default(), tf.device(HOST):
            self._message = v1.placeholder(_WORD, [None])
            self._gathered = self._gather(self._message)
        self._means, self._next_mean, self._broadcasts = {}, _FIRST_MEAN, {}
        self._is_waiting, self._batches = False, 0
        watch = MeansWatchdog(self._membership, cluster.stall_timeout_secs)
        threading.Thread(target=self._watch, args=[watch], name="exchanges", daemon=True).start()

    def _gather(self, message: tf.Tensor) -> list[tf.Tensor]:
        """Returns all workers' messages, padded to one length, and their lengths."""
        own = tf.shape(message, out_type=tf.int64)
        lengths = tf.raw_ops.CollectiveGather(
            input=own, group_size=self.size, group_key=_LENGTHS, instance_key=0, shape=[self.size]
        )
        longest = tf.reduce_max(lengths)
        messages = tf.raw_ops.CollectiveGatherV2(
            input=tf.pad(message, [[0, longest - own[0]]]), group_size=self.size, group_key=_MESSAGES,
            instance_key=tf.cast(longest, tf.int32),  # one key for each length, for good
            ordering_token=[], communication_hint="ring",
        )  # fmt: skip
        return [lengths, tf.reshape(messages, [self.size, -1])]

    def _watch(self, watch: MeansWatchdog) -> None:
        """Reports this worker's progress, and how long it has waited for the others."""
        while True:
            time.sleep(_LOOK_SECS)
            begun = max(self._batches, 1)  # others may be waited for before the first batch too
            watch.note(begun, begun - self._is_waiting)

    def gather(self, point: str, arrays: Sequence[np.ndarray] = (), **facts: str | int) -> list[list[np.ndarray]]:
        """Returns the arrays over workers.

        Args:
          point: this worker's place in the program.
          arrays: of the same number and dtypes in all workers.
          facts: by name, values that must be the same in all workers.

        Raises:
          ConfigError: in all workers, if one of them differs from the chief.
          WorkerError: a worker is missing.
        """
        message = _packed({"point": point, "facts": facts}, arrays)
        lengths, messages = self._run(self._gathered, {self._message: message})
        found = [_unpacked(message[:n], arrays) for n, message in zip(lengths, messages, strict=True)]
        for i, (about, _) in enumerate(found):
            self._check(i, about, found[0][0])
        return [arrays() for _, arrays in found]

    def mean(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the means over workers, to the bit the same in all, of arrays of equal shapes."""
        signature = tuple((array.shape, array.dtype.name) for array in arrays)
        if signature not in self._means:
            with self._graph.as_default(), tf.device(HOST):
                own = [v1.placeholder(array.dtype, array.shape) for array in arrays]
                reduce = AllReduce([HOST], "collective", None, self.size, self._next_mean)
                self._means[signature] = own, *reduce.mean([own])
            self._next_mean += len(reduce.operations)
        own, means = self._means[signature]
        return self._run(means, dict(zip(own, arrays, strict=True)))

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the chief's arrays; all workers give arrays of the same shapes and dtypes."""
        message = _packed({}, arrays)
        if message.size not in self._broadcasts:
            about = dict(group_size=self.size, group_key=_BROADCASTS, instance_key=len(self._broadcasts))
            with self._graph.as_default(), tf.device(HOST):
                own, shape = v1.placeholder(_WORD, message.shape), message.shape
                if self.is_chief:
                    sent = tf.raw_ops.CollectiveBcastSend(input=own, shape=shape, **about)
                else:
                    sent = tf.raw_ops.CollectiveBcastRecv(T=own.dtype, shape=shape, **about)
                self._broadcasts[message.size] = own, sent
        own, sent = self._broadcasts[message.size]
        _, found = _unpacked(self._run(sent, {own: message} if self.is_chief else {}), arrays)
        return found()

    def begin_batches(self, series: str = "") -> None:
        """Notes that a series of batches begins; series: its name for messages."""
        self._series, self._batch = series, 0
        if isinstance(self.failure, errors.ConfigError):  # all workers are at the same place
            self.failure = None

    def next_batch(self, kind: str) -> str:
        """Notes that a batch begins; returns its name."""
        self._batches += 1
        self._batch += 1
        return f"batch {self._batch} of {kind}{self._series}"

    def check_order(self, batch: str, digests: Sequence[int]) -> None:
        """Raises ConfigError in all workers if digests, over workers, of what they read for a batch differ."""
        differing = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
        if differing is not None:
            self.failure = errors.ConfigError(
                f"{self._membership.task.name(differing)} has read other examples for {batch} than the chief, or in "
                f"another order. {SEED}"
            )
            raise self.failure

    def _run(self, fetches, feeds):
        with self._lock:
            if isinstance(self.failure, errors.WorkerError):
                raise self.failure
            self._is_waiting = True
            try:
                with self._membership.failures_named():
                    return self._session.run(fetches, feeds)
            except errors.UserError as error:
                self.failure = error
                raise
            finally:
                self._is_waiting = False

    def _check(self, worker: int, its: dict, chiefs: dict) -> None:
        """Raises ConfigError if a worker is elsewhere than the chief, or has other facts."""
        differing = [f"it has come to {its['point']}, the chief to {chiefs['point']}"]
        if its["point"] == chiefs["point"]:
            its, chiefs = its["facts"], chiefs["facts"]
            differing = [f"{name} is {its.get(name, 'not given')}, the chief's {chiefs.get(name, 'not given')}"
                         for name in {**chiefs, **its} if its.get(name) != chiefs.get(name)]  # fmt: skip
        if differing:
            self.failure = errors.ConfigError(
                f"{self._membership.task.name(worker)} cannot train with the chief: {'; '.join(differing)}. Start "
                "all workers with the same program and data."
            )
            raise self.failure


@functools.cache
def find() -> Workers | None:
    """Returns the workers that this process trains with, joining their cluster, or None; raises as cluster.init."""
    return None if find_task(None, None).is_alone else Workers(program.init(gpus=()))


def _packed(about: Mapping, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a message: the length of its head, the head, the arrays; in whole words."""
    head = json.dumps({"about": about, "shapes": [np.shape(array) for array in arrays]}).encode()
    parts = [len(head).to_bytes(_WORD.itemsize, "little"), head, *(np.asarray(array).tobytes() for array in arrays)]
    message = b"".join(parts)
    return np.frombuffer(message + bytes(-len(message) % _WORD.itemsize), _WORD)


def _unpacked(message: np.ndarray, alike: Sequence[np.ndarray]):
    """Returns a message's head and a function that returns its arrays, of the dtypes of these."""
    data = message.tobytes()
    begin = _WORD.itemsize + int.from_bytes(data[: _WORD.itemsize], "little")
    head = json.loads(data[_WORD.itemsize : begin])

    def arrays():
        found, offset = [], begin
        for shape, other in zip(head["shapes"], alike, strict=True):
            count = int(np.prod(shape))
            found.append(np.frombuffer(data, np.asarray(other).dtype, count, offset).reshape(shape))
            offset += found[-1].nbytes
        return found

    return head["about"], arrays
