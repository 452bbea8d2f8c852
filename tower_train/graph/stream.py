"""An endless, seeded stream of positions, each of which is one example.

Position p belongs to epoch p // n and to example permutation(seed, epoch)[p % n]. Nothing is buffered and nothing
depends on the number of towers, so a run that knows how many examples it has seen knows where it is.

A data set that is not fetched by index but comes in an order of its own has that order here too; then the place in it
is known to its iterator only, whose state goes into the checkpoint.
"""

import dataclasses
import hashlib

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples, Tensors, in_fixed_order
from tower_train.graph import iterator_state
from tower_train.workload import Workload

_PHILOX = 1  # the algorithm's number in tf.random.Algorithm
_OUTPUTS = 4  # 32-bit numbers that one step of Philox's counter gives (Salmon et al. 2011, "Philox4x32")
_ROUNDS = 8  # of the shuffling cipher; its default of 4 leaves many neighbours among 50,000 examples together
_PREFETCHED_STEPS = 2


def shuffled_indices(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
    """The examples at the given places of the endless stream.

    Args:
      positions: int64 [batch].
      num_examples: the size of an epoch.
      seed: 0 <= seed < 2**63.

    Returns:
      int64 [batch], each 0 <= index < num_examples. Every epoch holds every example once, in an order of its own.
    """
    # The cipher looks at the low 8 bits only of each of its three seeds (9 above 65,536 examples), so seeds that count
    # epochs would soon repeat: it gets random ones.
    epochs = positions // num_examples
    first = tf.reduce_min(epochs)
    seeds = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.stack([tf.reduce_max(epochs) - first + 1, _OUTPUTS]), dtype=tf.uint32, **_philox(f"{seed}", first)
    )
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % num_examples,
        seed=tf.gather(seeds[:, :3], epochs - first),
        max_index=tf.fill(tf.shape(positions), np.int64(num_examples - 1)),
        rounds=_ROUNDS,
    )


class PositionDraws:
    """Implements workload.Draws for `batch` consecutive positions.

    Philox is a function of (key, counter): the key comes from the seed and the name, the counter is the position. It
    counts on by one from number to number, so for the indices of examples, which lie anywhere, there is SplitMix64.

    Attributes:
      positions, epochs: as in workload.Draws.
      indices: int64 [batch], the examples at these positions; None where they come in an order of their own.
    """

    def __init__(self, first_position: tf.Tensor, batch: int, num_examples: int, seed: int, by_index: bool = True):
        self.positions = first_position + tf.range(batch, dtype=tf.int64)
        self.epochs = self.positions // num_examples
        self.indices = shuffled_indices(self.positions, num_examples, seed) if by_index else None
        self._first, self._batch, self._seed = first_position, batch, seed

    def uniform(self, name: str, count: int) -> tf.Tensor:
        counters_each = -(-count // _OUTPUTS)
        numbers = tf.raw_ops.StatelessRandomUniformV2(
            shape=[self._batch, counters_each * _OUTPUTS],
            **_philox(f"{self._seed} {name}", self._first * counters_each),
        )
        return numbers[:, :count]

    def of_example(self, name: str, count: int) -> tf.Tensor:
        if self.indices is None:
            raise errors.GraphError(
                f"draws.of_example({name!r}): these examples come in an order of their own, so that none has an index "
                "to draw its numbers by. Use draws.uniform, or examples that are fetched by index."
            )
        counters = self.indices[:, tf.newaxis] * count + tf.range(count, dtype=tf.int64)
        return split_mix(_key(f"{self._seed} example {name}"), counters)


def split_mix(key: int, counters: tf.Tensor) -> tf.Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 2.3): the
    numbers at the given places of the sequence that begins at the key.

    Args:
      key: 0 <= key < 2**64.
      counters: int64 [...], at least 0.

    Returns:
      float32 [...], multiples of 2^-24, uniform in [0, 1).
    """

    def xor_shifted(bits, shift):
        return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64)))

    bits = tf.constant(key, tf.uint64) + (tf.cast(counters, tf.uint64) + 1) * 0x9E3779B97F4A7C15
    bits = xor_shifted(bits, 30) * 0xBF58476D1CE4E5B9
    bits = xor_shifted(bits, 27) * 0x94D049BB133111EB
    highest = tf.bitwise.right_shift(xor_shifted(bits, 31), tf.constant(40, tf.uint64))
    return tf.cast(tf.cast(highest, tf.int32), tf.float32) * 2.0**-24


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _philox(key: str, counter: tf.Tensor) -> dict:
    """The arguments that make a stateless op give the numbers of this key from this step (int64 scalar) on."""
    return {
        "key": tf.constant([_key(key)], tf.uint64),
        "counter": tf.cast(tf.stack([counter, 0]), tf.uint64),
        "alg": _PHILOX,
    }


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches for all towers.

    Attributes:
      batches: a list over towers of (features, labels); each session.run consumes one step of all of them.
      initializer: op that puts the stream at its start; run it after variables hold their values.
      state: what to save of it and to restore after that, where the start does not say it all; else None.
    """

    batches: list[tuple[Tensors, Tensors]]
    initializer: tf.Operation
    state: iterator_state.IteratorState | None = None


@dataclasses.dataclass(frozen=True)
class Split:
    """The parts of a step's examples, one a tower.

    Attributes:
      tower_batch: examples a tower.
      num_towers: of each worker.
      num_workers: processes that train together.
      worker: which of them this is.
    """

    tower_batch: int
    num_towers: int
    num_workers: int = 1
    worker: int = 0

    @property
    def worker_batch(self) -> int:
        """Examples a worker."""
        return self.tower_batch * self.num_towers


def training_stream(workload: Workload, examples: Examples, seed: int, start: tf.Tensor, split: Split) -> Stream:
    """The stream from position `start` (int64 scalar) on.

    Tower i of a step that begins at position p gets the positions from p + i * tower_batch on, counted over the towers
    of all workers, worker 0's first.

    Raises:
      ConfigError: several workers on examples that are not fetched by index.
    """
    step_size = split.worker_batch * split.num_workers
    firsts = tf.data.Dataset.range(
        start + split.worker * split.worker_batch, np.iinfo(np.int64).max - step_size, step_size
    )
    if examples.elements and split.num_workers > 1:
        raise errors.ConfigError(
            f"{examples.name} comes in an order of its own, which {split.num_workers} workers cannot take their parts "
            "of. Use one process, or examples that are fetched by index."
        )
    if examples.elements:
        return _training_stream_of_elements(workload, examples, seed, firsts, split)
    fetch = examples.open()

    def tower_examples(first: tf.Tensor):
        draws = PositionDraws(first, split.tower_batch, examples.num_examples, seed)
        features, labels = fetch(draws.indices)
        return _with_batch_size((_preprocessed(workload, features, draws), labels), split.tower_batch)

    def step(first: tf.Tensor):
        return tuple(tower_examples(first + i * split.tower_batch) for i in range(split.num_towers))

    iterator = _iterator(firsts, step, examples)
    return Stream(list(iterator.get_next()), iterator.initializer)


def _training_stream_of_elements(
    workload: Workload, examples: Examples, seed: int, firsts: tf.data.Dataset, split: Split
) -> Stream:
    """The elements of a data set's own dataset, a whole step at a time.

    Towers divide what has left the iterator, so that its state does not depend on their number.
    """
    step_size = split.worker_batch
    elements = examples.elements()

    def step(first: tf.Tensor, batch: tuple[Tensors, Tensors]):
        features, labels = batch
        draws = PositionDraws(first, step_size, examples.num_examples, seed, by_index=False)
        return _with_batch_size((_preprocessed(workload, features, draws), labels), step_size)

    batches = in_fixed_order(elements).batch(step_size, drop_remainder=True)
    iterator = _iterator(tf.data.Dataset.zip(firsts, batches), step, examples)
    whole = iterator.get_next()
    towers = [
        tf.nest.map_structure(lambda t, i=i: t[i * split.tower_batch : (i + 1) * split.tower_batch], whole)
        for i in range(split.num_towers)
    ]
    length = tf.data.experimental.cardinality(elements)
    return Stream(towers, iterator.initializer, iterator_state.of(iterator, length, step_size))


def evaluation_stream(
    workload: Workload, examples: Examples, tower_batch: int, num_towers: int
) -> tuple[Stream, list[tf.Tensor]]:
    """Every example once, in order of its index.

    Every tower always gets tower_batch examples, since not every convolution can do with none: at the end they are
    filled up with the last example.

    Returns:
      The stream and, over towers, bool [tower_batch]: which examples count.
    """
    step_size = tower_batch * num_towers
    if examples.elements:
        steps = in_fixed_order(examples.elements()).batch(step_size).map(lambda *batch: (batch, _size(batch)))
    else:
        steps = tf.data.Dataset.range(0, examples.num_examples, step_size)
        fetch = examples.open()

    def tower_examples(places: tf.Tensor, end, take):
        """Takes a batch from int64 [tower_batch] places; those from `end` on do not count."""
        features, labels = take(tf.minimum(places, end - 1))
        features = workload.prepare(features) if workload.prepare else features
        return _with_batch_size((features, labels, places < end), tower_batch)

    def by_index(first: tf.Tensor):
        return tuple(tower_examples(places + first, examples.num_examples, fetch) for places in _places())

    def of_batch(batch: tuple[Tensors, Tensors], size: tf.Tensor):
        def take(places: tf.Tensor):
            return tf.nest.map_structure(lambda t: tf.gather(t, places), batch)

        return tuple(tower_examples(places, size, take) for places in _places())

    def _places():
        return [i * tower_batch + tf.range(tower_batch, dtype=tf.int64) for i in range(num_towers)]

    iterator = _iterator(steps, of_batch if examples.elements else by_index, examples)
    towers = iterator.get_next()
    return (
        Stream([(features, labels) for features, labels, _ in towers], iterator.initializer),
        [counted for _, _, counted in towers],
    )


def _preprocessed(workload: Workload, features: Tensors, draws: PositionDraws) -> Tensors:
    if workload.distort:
        return workload.distort(features, draws)
    return workload.prepare(features) if workload.prepare else features


def _size(batch: tuple[Tensors, Tensors]) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _iterator(steps: tf.data.Dataset, step, examples: Examples):
    step = tf.autograph.experimental.do_not_convert(step)  # workloads use TensorFlow's own conditionals, if any
    dataset = steps.map(step, num_parallel_calls=examples.parallel_steps, deterministic=True).prefetch(
        _PREFETCHED_STEPS
    )
    return tf.compat.v1.data.make_initializable_iterator(dataset)


def _with_batch_size(tensors: Tensors, batch: int) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t, [batch, *t.shape[1:]]), tensors)
