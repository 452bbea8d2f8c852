"""Exchange between the processes that train one Keras model: one by itself, or several workers.

Keras' steps run where the program has begun TensorFlow, long before it is known that there are other workers. To
begin its collective operations then loses the program's variables or, with the worker's server as another machine, its
lookup tables, and they are no faster. So they run in a session on the worker's server, which the step calls.
"""

import functools
import io
import json
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster import program
from tower_train.cluster.task import find_task
from tower_train.fronts import parts
from tower_train.graph import collectives
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

_WORD = np.dtype(np.int64)  # messages are sent in words of this type
_WHOLE = 8  # first batches of a series, which workers compare byte by byte
_SAMPLE = 4096  # numbers of each tensor that they compare of later ones


class Exchange:
    """The exchange of a process by itself; of several it is a subclass."""

    rank, size, is_chief = 0, 1, True

    def begin(self, series: str, data) -> None:
        """Begins a step with the others. series: the kind of step; data: the whole batch, which each process has."""

    def rows(self, tensors: Sequence) -> list:
        """Returns the rows of all processes, one after the other, of tensors with any numbers of them."""
        return list(tensors)

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over processes, to the bit the same in all, of tensors of equal shapes."""
        return list(tensors)

    def first(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the chief's tensors."""
        return list(tensors)


class Workers(Exchange):
    """This process among the workers that train one model together, all of which must make the same calls."""

    def __init__(self, cluster: program.Cluster):
        self.rank, self.size, self.is_chief = cluster.rank, cluster.size, cluster.is_chief
        self.failure: errors.UserError | None = None
        self._membership, self._graph = cluster.membership, tf.Graph()
        self._session = v1.Session(cluster.target, self._graph, cluster.session_config)
        self._membership.session_opened(self._session)
        self._series, self._batch, self._counts = "", 0, cluster.counts

    def begin(self, series, data):
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]

        def compare(examples, *arrays):
            self._batch += 1
            checksum = functools.reduce(lambda crc, each: zlib.crc32(self._bytes(each), crc), arrays, 0)
            facts = {"the number of examples": int(examples), "the examples' checksum": checksum}
            self.gather(f"batch {self._batch} of {series}{self._series}", **facts)
            return []

        self._called(compare, [tf.convert_to_tensor(parts.batch_size(data)), *leaves], [])

    def rows(self, tensors):
        def gathered(*arrays):
            return list(map(np.concatenate, zip(*self.gather("an exchange of rows", arrays), strict=True)))

        return self._called(gathered, tensors, [tf.TensorShape([None, *tensor.shape[1:]]) for tensor in tensors])

    def sum(self, tensors):
        return self._called(lambda *arrays: self.sum_arrays(arrays), tensors, [tensor.shape for tensor in tensors])

    def first(self, tensors):
        shapes = [tensor.shape for tensor in tensors]
        return self._called(lambda *arrays: self.gather("an exchange of values", arrays)[0], tensors, shapes)

    def gather(self, point: str, arrays: Sequence[np.ndarray] = (), **facts) -> list[list[np.ndarray]]:
        """Returns over workers arrays of any shapes. ConfigError in all of them if a worker is at another place in the
        program than the chief, or has another value for one of these facts, strings and numbers by name."""
        message, dtypes = io.BytesIO(), [array.dtype for array in arrays]
        place = {"its place": point} | facts | {"what it sends": str(dtypes)}
        for each in (json.dumps(place), *arrays):
            np.save(message, each, allow_pickle=False)
        sent = message.getvalue()
        words = np.frombuffer(sent + bytes(-len(sent) % _WORD.itemsize), _WORD)
        [words], lengths = self._run("gather", _gathered, words)
        by_worker = [io.BytesIO(part) for part in np.split(words, np.cumsum(lengths)[:-1])]
        places = [json.loads(str(np.load(part, allow_pickle=False))) for part in by_worker]
        for worker, theirs in enumerate(places):
            for name, value in places[0].items():
                if theirs.get(name) != value:
                    who, where = self._membership.task.name(worker), places[0]["its place"]
                    raise errors.ConfigError(
                        f"{who} cannot train with the chief in {where}: {name} is {theirs.get(name)}, the chief's "
                        f"{value}. Start all workers with the same program and data. Give shuffles and generators a "
                        "seed, as in dataset.shuffle(1000, seed=1), or call keras.utils.set_random_seed before the "
                        "data are made."
                    )
        # Types that numpy does not know, as bfloat16, come as bytes.
        return [[np.load(part, allow_pickle=False).view(dtype) for dtype in dtypes] for part in by_worker]

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums over workers, to the bit the same in all, of arrays of equal shapes."""
        sums = list(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):  # in one order in all workers
            members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([np.ravel(arrays[i]) for i in members])
            total = self._run(f"sum of {flat.size} {dtype}", collectives.reduce, flat)
            for i in members:
                part, total = np.split(total, [arrays[i].size])
                sums[i] = part.reshape(np.shape(arrays[i]))
        return sums

    def begin_batches(self, series: str = "") -> None:
        """Notes that a series of batches begins, of this name for messages."""
        self._series, self._batch, self.failure = series, 0, None

    def _bytes(self, array: np.ndarray) -> bytes:
        if array.dtype == object:  # strings
            return b"\0".join(array.ravel().tolist())
        numbers = np.ravel(array)
        return (numbers[:: max(1, numbers.size // _SAMPLE)] if self._batch > _WHOLE else numbers).tobytes()

    def _called(self, function: Callable, tensors: Sequence[tf.Tensor], shapes: Sequence) -> list[tf.Tensor]:
        """Calls a function of arrays in a step, which returns arrays of these shapes and the tensors' dtypes."""
        if not tensors:
            return []

        def run(*arrays):
            try:
                return function(*arrays)
            except errors.UserError as error:
                self.failure = error  # TensorFlow logs an error with all that led to it
                raise RuntimeError(str(error)) from None

        returned = tf.numpy_function(run, tensors, [tensor.dtype for tensor in tensors[: len(shapes)]])
        for tensor, shape in zip(returned, shapes, strict=True) if shapes else ():
            tensor.set_shape(shape)
        return returned

    @functools.cache  # noqa: B019 - lives as long as the process
    def _made(self, name: str, make: Callable, dtype: np.dtype) -> tuple:
        """Returns the placeholder and the results of operations that workers find by a name."""
        with self._graph.as_default(), tf.device(HOST):
            fed = v1.placeholder(dtype, [None])
            return fed, make(fed, self.size, f"keras {name}")

    def _run(self, name: str, make: Callable, array: np.ndarray):
        """Runs make(values, workers, name) in all of them on an array [values]."""
        fed, results = self._made(name, make, array.dtype)
        self._counts[0] += 1  # for the cluster to watch
        with self._membership.failures_named():
            found = self._session.run(results, {fed: array})
        self._counts[1] += 1
        return found


def _gathered(words: tf.Tensor, *args) -> tuple[list[tf.Tensor], tf.Tensor]:
    return collectives.gather([words], *args)


ALONE = Exchange()


@functools.cache
def find() -> Exchange:
    """Returns what this process trains with, joining its cluster if there is one; raises as cluster.init."""
    if not program.is_initialized():
        try:
            task = find_task(None, None)
        except errors.ConfigError:
            program.leave_by_status()  # in one line, also of a task that trains nothing, such as an evaluator
            raise
        if task.is_alone:
            return ALONE
        program.init(gpus=(), task=task)
    return Workers(program.current()) if program.current().size > 1 else ALONE
