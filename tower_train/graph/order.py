"""Positions in the endless stream of examples: the example at each, and its random numbers."""

import contextlib

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST
from tower_train.graph.draws import OUTPUTS, key_of, philox, split_mix

_ROUNDS = 8  # of the shuffling cipher; the default of 4 leaves many neighbours of 50,000 examples together


def shuffled_indices(positions: tf.Tensor, num_examples: int, seed: int) -> tf.Tensor:
    """Returns the examples at the given positions of the endless stream.

    Args:
      positions: int64 [batch].
      num_examples: the size of an epoch.
      seed: 0 <= seed < 2**63.

    Returns:
      int64 [batch], each 0 <= index < num_examples. Every epoch holds every example once, in an order of its own.
    """
    # The cipher uses only the low 8 bits of each of its three seeds (9 above 65,536 examples), so counted epochs would
    # soon repeat: it gets random ones.
    epochs = positions // num_examples
    first = tf.reduce_min(epochs)
    seeds = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.stack([tf.reduce_max(epochs) - first + 1, OUTPUTS]), dtype=tf.uint32, **philox(f"{seed}", first)
    )
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % num_examples,
        seed=tf.gather(seeds[:, :3], epochs - first),
        max_index=tf.fill(tf.shape(positions), np.int64(num_examples - 1)),
        rounds=_ROUNDS,
    )


class PositionDraws:
    """Implements workload.Draws for `batch` consecutive positions.

    Philox is a function of (key, counter): the key comes from the seed and the name, the counter is the position. The
    counter advances with each number, so the indices of examples, which are not consecutive, use SplitMix64.

    With on_device they are drawn on the tower's device, but numbers by index on the host, as the indices are.

    Attributes:
      positions, epochs: as in workload.Draws.
      indices: int64 [batch], the examples at these positions; None for examples in their own order.
    """

    def __init__(
        self,
        first_position: tf.Tensor,
        batch: int,
        num_examples: int,
        seed: int,
        by_index: bool = True,
        on_device: bool = False,
    ):
        self._on_device = on_device
        with self._aside():
            self.positions = first_position + tf.range(batch, dtype=tf.int64)
            self.epochs = self.positions // num_examples
            self.indices = shuffled_indices(self.positions, num_examples, seed) if by_index else None
        self._first, self._batch, self._seed = first_position, batch, seed

    def _aside(self):
        """Builds on the host within this block, but without a device in input functions, which would slow them down."""
        return tf.device(HOST) if self._on_device else contextlib.nullcontext()

    def uniform(self, name: str, count: int) -> tf.Tensor:
        counters_each = -(-count // OUTPUTS)
        with self._aside():
            where = philox(f"{self._seed} {name}", self._first * counters_each)
        numbers = tf.raw_ops.StatelessRandomUniformV2(shape=[self._batch, counters_each * OUTPUTS], **where)
        return numbers[:, :count]

    def of_example(self, name: str, count: int) -> tf.Tensor:
        if self.indices is None:
            raise errors.GraphError(
                f"draws.of_example({name!r}): these examples come in an order of their own, so that none has an index "
                "to draw its numbers by. Use draws.uniform, or examples that are fetched by index."
            )
        with self._aside():
            counters = self.indices[:, tf.newaxis] * count + tf.range(count, dtype=tf.int64)
            return split_mix(key_of(f"{self._seed} example {name}"), counters)
