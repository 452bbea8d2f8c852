"""The workers that train one Keras model together, with their comparisons, gathers and sums.

Keras' steps run where the program has begun TensorFlow, long before it is known that there are other workers; then
collective operations are no longer possible. So they run in a session on the worker's server, which the step calls.
"""

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster.task import find_task
from tower_train.fronts import program
from tower_train.graph import collectives
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

SEED = (
    "Give shuffles and generators a seed, as in dataset.shuffle(1000, seed=1), or call keras.utils.set_random_seed "
    "before the data are made."
)
_WORD = np.dtype(np.int64)  # messages are sent in words of this type


class Workers:
    """This process among the workers that train one model together, all of which must make the same calls.

    Args:
      cluster: this process's.

    Attributes:
      rank, size, is_chief: as of the cluster.
    """

    def __init__(self, cluster: program.Cluster):
        self.rank, self.size, self.is_chief = cluster.rank, cluster.size, cluster.is_chief
        self._failure: errors.UserError | None = None
        self._membership, self._lock = cluster.membership, threading.Lock()
        self._graph = tf.Graph()
        self._session = v1.Session(cluster.target, self._graph, cluster.session_config)
        self._membership.session_opened(self._session)
        self._series, self._batch, self._batches, self._counts = "", 0, 0, cluster.counts
        self._note_progress()

    def gather(self, point: str, arrays: Sequence[np.ndarray] = (), **facts: str | int) -> list[Sequence[np.ndarray]]:
        """Returns the arrays over workers.

        Args:
          point: this worker's place in the program.
          arrays: in any number and shape.
          facts: by name, values that must be the same in all workers.

        Raises:
          ConfigError: in all workers, if one of them differs from the chief.
          WorkerError: a worker is missing.
        """
        # Pickled, as whoever reaches a worker's server can have it run anything anyway.
        message = pickle.dumps((point, facts, [np.asarray(array) for array in arrays]))
        words, lengths = self._run("gather", self._gathered, _words(message))
        by_worker = [pickle.loads(part) for part in np.split(words, np.cumsum(lengths)[:-1])]
        for i, (*its, _) in enumerate(by_worker):
            self._compare(i, its, by_worker[0][:2])
        return [arrays for *_, arrays in by_worker]

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

    def begin_batches(self, series: str = "") -> None:
        """Notes that a series of batches begins; series: its name for messages."""
        self._series, self._batch = series, 0
        if isinstance(self._failure, errors.ConfigError):  # all workers are at the same place
            self._failure = None

    def next_batch(self, kind: str) -> tuple[str, int]:
        """Notes that a batch begins; returns its name, and its number in the series."""
        self._batches += 1
        self._batch += 1
        self._note_progress()
        return f"batch {self._batch} of {kind}{self._series}", self._batch

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        """Raises within this block the error of an exchange itself, not what TensorFlow makes of it."""
        try:
            yield
        except tf.errors.OpError:
            if self._failure:
                raise self._failure from None
            raise

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
            if isinstance(self._failure, errors.WorkerError):
                raise self._failure
            fed, results = self._made(name, make, array.dtype)
            self._note_progress(is_waiting=True)
            try:
                with self._membership.failures_named():
                    return self._session.run(results, {fed: array})
            except errors.UserError as error:
                self._failure = error
                raise
            finally:
                self._note_progress()

    def _note_progress(self, is_waiting: bool = False) -> None:
        """Notes the batches begun, of which the last one may wait for other workers, for the cluster to watch."""
        begun = max(self._batches, 1)  # others may be waited for before the first batch too
        self._counts[:] = begun, begun - is_waiting

    def _compare(self, worker: int, its: tuple[str, dict], chiefs: tuple[str, dict]) -> None:
        """Raises ConfigError if a worker is elsewhere than the chief, or has other facts."""
        (point, facts), (chiefs_point, chiefs_facts) = its, chiefs
        differing = [f"it has come to {point}, the chief to {chiefs_point}"]
        if point == chiefs_point:
            names = [name for name in {**chiefs_facts, **facts} if facts.get(name) != chiefs_facts.get(name)]
            pairs = [(name, *(of.get(name, "not given") for of in (facts, chiefs_facts))) for name in names]
            differing = [f"{name} is {value}, the chief's {chiefs_value}" for name, value, chiefs_value in pairs]
        if differing:
            self._failure = errors.ConfigError(
                f"{self._membership.task.name(worker)} cannot train with the chief in {point}: {'; '.join(differing)}. "
                f"Start all workers with the same program and data. {SEED}"
            )
            raise self._failure


@functools.cache
def find() -> Workers | None:
    """Returns the workers that this process trains with, joining their cluster, or None; raises as cluster.init."""
    return None if find_task(None, None).is_alone else Workers(program.init(gpus=()))


def _words(message: bytes) -> np.ndarray:
    return np.frombuffer(message + bytes(-len(message) % _WORD.itemsize), _WORD)
