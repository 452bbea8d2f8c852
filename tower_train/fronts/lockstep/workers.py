"""The workers that train one Keras model together, with their comparisons, gathers and sums.

Keras' steps run where the program has begun TensorFlow, long before it is known that there are other workers; then
collective operations are no longer possible. So they run in a session on the worker's server, which the step calls.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster import program
from tower_train.cluster.task import find_task
from tower_train.cluster.watchdog import MeansWatchdog
from tower_train.graph import collectives
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

SEED = (
    "Give shuffles and generators a seed, as in dataset.shuffle(1000, seed=1), or call keras.utils.set_random_seed "
    "before the data are made."
)
_LOOK_SECS = 1.0
_WORD = np.dtype(np.int64)  # messages are sent in words of this type


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
        self.failure: errors.UserError | None = None
        self._membership, self._lock = cluster.membership, threading.Lock()
        self._graph = tf.Graph()
        self._session = v1.Session(cluster.target, self._graph, cluster.session_config)
        self._membership.session_opened(self._session)
        self._series, self._batch, self._batches, self._is_waiting = "", 0, 0, False
        watch = MeansWatchdog(self._membership, cluster.stall_timeout_secs)
        threading.Thread(target=self._watch, args=[watch], name="exchanges", daemon=True).start()

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
        words, lengths = self._run("gather", self._gathered, message)
        ends = np.cumsum(lengths)
        by_worker = [_unpacked(words[end - n : end], arrays) for end, n in zip(ends, lengths, strict=True)]
        for i, (about, _) in enumerate(by_worker):
            self._compare(i, about, by_worker[0][0])
        return [unpack() for _, unpack in by_worker]

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums over workers, to the bit the same in all, of arrays of equal shapes."""
        sums = list(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):  # in one order in all workers
            members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([np.ravel(arrays[i]) for i in members])
            total = self._run(f"sum of {flat.size} {dtype}", self._summed, flat)
            ends = np.cumsum([arrays[i].size for i in members])
            for i, part in zip(members, np.split(total, ends[:-1]), strict=True):
                sums[i] = part.reshape(np.shape(arrays[i]))
        return sums

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the chief's arrays; all workers give arrays of the same shapes and dtypes."""
        message = _packed({}, arrays)
        [words] = self.sum([message if self.is_chief else np.zeros_like(message)])
        return _unpacked(words, arrays)[1]()

    def begin_batches(self, series: str = "") -> None:
        """Notes that a series of batches begins; series: its name for messages."""
        self._series, self._batch = series, 0
        if isinstance(self.failure, errors.ConfigError):  # all workers are at the same place
            self.failure = None

    def next_batch(self, kind: str) -> tuple[str, int]:
        """Notes that a batch begins; returns its name, and its number in the series."""
        self._batches += 1
        self._batch += 1
        return f"batch {self._batch} of {kind}{self._series}", self._batch

    def check_order(self, batch: str, digests: Sequence[int]) -> None:
        """Raises ConfigError in all workers if digests, over workers, of what they read for a batch differ."""
        differing = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
        if differing is not None:
            self.failure = errors.ConfigError(
                f"{self._membership.task.name(differing)} has read other examples for {batch} than the chief, or in "
                f"another order. {SEED}"
            )
            raise self.failure

    def _gathered(self, message: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        [words], lengths = collectives.gather([message], self.size, name)
        return words, lengths

    def _summed(self, values: tf.Tensor, name: str) -> tf.Tensor:
        return collectives.reduce(values, self.size, name)

    @functools.cache  # noqa: B019 - lives as long as the process
    def _made(self, name: str, make: Callable, dtype: np.dtype) -> tuple:
        """Returns the placeholder and the results of operations that workers find by a name."""
        with self._graph.as_default(), tf.device(HOST):
            fed = v1.placeholder(dtype, [None])
            return fed, make(fed, f"keras {name}")

    def _run(self, name: str, make: Callable, array: np.ndarray):
        with self._lock:
            if isinstance(self.failure, errors.WorkerError):
                raise self.failure
            fed, results = self._made(name, make, array.dtype)
            self._is_waiting = True
            try:
                with self._membership.failures_named():
                    return self._session.run(results, {fed: array})
            except errors.UserError as error:
                self.failure = error
                raise
            finally:
                self._is_waiting = False

    def _compare(self, worker: int, its: dict, chiefs: dict) -> None:
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
