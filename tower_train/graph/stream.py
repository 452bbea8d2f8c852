"""Which example is trained on when: an endless, seeded stream of positions.

Position p belongs to epoch p // n and to example permutation(seed, epoch)[p % n]. Nothing is buffered and nothing
depends on the number of towers, so a run that knows how many examples it has seen knows where it is.
"""

import dataclasses
import hashlib

import numpy as np
import tensorflow as tf

from tower_train.workload import Examples, Tensors, Workload

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

    Philox is a function of (key, counter): the key comes from the seed and the name, the counter is the position.
    """

    def __init__(self, first_position: tf.Tensor, batch: int, num_examples: int, seed: int):
        self.positions = first_position + tf.range(batch, dtype=tf.int64)
        self.epochs = self.positions // num_examples
        self._first, self._batch, self._seed = first_position, batch, seed

    def uniform(self, name: str, count: int) -> tf.Tensor:
        counters_each = -(-count // _OUTPUTS)
        numbers = tf.raw_ops.StatelessRandomUniformV2(
            shape=[self._batch, counters_each * _OUTPUTS],
            **_philox(f"{self._seed} {name}", self._first * counters_each),
        )
        return numbers[:, :count]


def _philox(key: str, counter: tf.Tensor) -> dict:
    """The arguments that make a stateless op give the numbers of this key from this step (int64 scalar) on."""
    digest = hashlib.sha256(key.encode()).digest()
    return {
        "key": tf.constant([int.from_bytes(digest[:8], "little")], tf.uint64),
        "counter": tf.cast(tf.stack([counter, 0]), tf.uint64),
        "alg": _PHILOX,
    }


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches for all towers.

    Attributes:
      batches: a list over towers of (features, labels); each session.run consumes one step of all of them.
      initializer: op that puts the stream at its start; run it after variables hold their values.
    """

    batches: list[tuple[Tensors, Tensors]]
    initializer: tf.Operation


def training_stream(
    workload: Workload, examples: Examples, seed: int, start: tf.Tensor, tower_batch: int, num_towers: int
) -> Stream:
    """The stream from position `start` (int64 scalar) on; a step takes tower_batch * num_towers positions.

    Tower i of a step that begins at position p gets the positions from p + i * tower_batch on.
    """
    fetch = examples.open()

    def tower_examples(first_position: tf.Tensor):
        draws = PositionDraws(first_position, tower_batch, examples.num_examples, seed)
        features, labels = fetch(shuffled_indices(draws.positions, examples.num_examples, seed))
        if workload.distort:
            features = workload.distort(features, draws)
        elif workload.prepare:
            features = workload.prepare(features)
        return _with_batch_size((features, labels), tower_batch)

    step_size = tower_batch * num_towers
    positions = tf.data.Dataset.range(start, np.iinfo(np.int64).max - step_size, step_size)
    return _stream(
        positions, lambda first: tuple(tower_examples(first + i * tower_batch) for i in range(num_towers)), examples
    )


def evaluation_stream(
    workload: Workload, examples: Examples, tower_batch: int, num_towers: int
) -> tuple[Stream, list[tf.Tensor]]:
    """Every example once, in order of its index.

    Every tower always gets tower_batch examples, since not every convolution can do with none: at the end they are
    filled up with the last example.

    Returns:
      The stream and, over towers, bool [tower_batch]: which examples count.
    """
    fetch = examples.open()

    def tower_examples(first: tf.Tensor):
        positions = first + tf.range(tower_batch, dtype=tf.int64)
        features, labels = fetch(tf.minimum(positions, examples.num_examples - 1))
        features = workload.prepare(features) if workload.prepare else features
        return _with_batch_size((features, labels, positions < examples.num_examples), tower_batch)

    firsts = tf.data.Dataset.range(0, examples.num_examples, tower_batch * num_towers)
    stream = _stream(
        firsts, lambda first: tuple(tower_examples(first + i * tower_batch) for i in range(num_towers)), examples
    )
    return (
        Stream([(features, labels) for features, labels, _ in stream.batches], stream.initializer),
        [counted for _, _, counted in stream.batches],
    )


def _stream(firsts: tf.data.Dataset, step, examples: Examples) -> Stream:
    step = tf.autograph.experimental.do_not_convert(step)  # workloads use TensorFlow's own conditionals, if any
    dataset = firsts.map(step, num_parallel_calls=examples.parallel_steps, deterministic=True).prefetch(
        _PREFETCHED_STEPS
    )
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    return Stream(list(iterator.get_next()), iterator.initializer)


def _with_batch_size(tensors: Tensors, batch: int) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t, [batch, *t.shape[1:]]), tensors)
