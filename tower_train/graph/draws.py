"""Random numbers as functions of a key and a position, which no division of the batch and no restart changes."""

import collections
import hashlib
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST

_PHILOX = 1  # the algorithm's number in tf.random.Algorithm
OUTPUTS = 4  # 32-bit numbers that one step of Philox's counter gives (Salmon et al. 2011, "Philox4x32")


def key_of(text: str) -> int:
    """Returns the 64-bit key of a name: 0 <= key < 2**64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def philox(name: str, counter: tf.Tensor) -> dict:
    """Returns the arguments by which a stateless op draws the numbers of a name from this counter on.

    Args:
      name: separates these numbers from others.
      counter: int64 scalar, in steps of OUTPUTS numbers of 32 bits.
    """
    return {
        "key": tf.constant([key_of(name)], tf.uint64),
        "counter": tf.cast(tf.stack([counter, 0]), tf.uint64),
        "alg": _PHILOX,
    }


def split_mix(key: int, counters: tf.Tensor) -> tf.Tensor:
    """Draws by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 2.3),
    at the given places of the sequence that begins at the key.

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


class TowerDraws:
    """The random numbers of one tower's layers: functions of (key, the layer's name, the example's position).

    The examples of a tower are consecutive positions. Each takes as many steps of Philox's counter as its numbers need,
    so a tower's numbers are one section of the numbers of all positions.

    Attributes:
      names: {layer: its number of draws}; each draw of a layer has numbers of its own.
    """

    def __init__(self, key: str, first: tf.Tensor | int = 0, batch: int | None = None, step: tf.Tensor | int = 0):
        """Draws nothing yet.

        Args:
          key: separates these numbers from others; for training the seed.
          first: int64 scalar, the position of the tower's first example.
          batch: the tower's examples; None for as many as the layers' tensors have rows.
          step: int64 scalar, the position of the first example of the step, over all towers.
        """
        self._key, self._first, self._batch, self._step = key, first, batch, step
        self._is_closed = False
        self.names: collections.Counter[str] = collections.Counter()

    def close(self) -> None:
        """Ends the forward pass: further draws are errors."""
        self._is_closed = True

    def rows_each(self, shape) -> int | None:
        """Returns the rows_each of `uniform` for a tensor of this shape.

        1 for a row per example, None for a scalar or one row in all, which belong to the step; 0 if rows and examples
        do not fit.
        """
        sizes = _sizes(shape)
        if sizes and isinstance(sizes[0], int) and sizes[0] == (self._batch or sizes[0]):
            return 1
        return None if sizes[:1] in ([], [1]) else 0

    def uniform(self, layer: str, shape, dtype: tf.DType = tf.float32, rows_each: int | None = 1) -> tf.Tensor:
        """Draws numbers uniform in [0, 1).

        Args:
          layer: its name, the same in all towers.
          shape: of the result, [batch * rows_each, ...]; integers or an integer tensor.
          dtype: floating point.
          rows_each: consecutive rows of one example; None: the numbers belong to the step, the same in all towers, and
            `shape` is any.

        Raises:
          GraphError: the rows are not those of the tower's examples.
        """
        return self._numbers(tf.raw_ops.StatelessRandomUniformV2, layer, shape, dtype, rows_each)

    def normal(self, layer: str, shape, dtype: tf.DType = tf.float32, rows_each: int | None = 1) -> tf.Tensor:
        """Draws numbers of the normal distribution with mean 0 and standard deviation 1; otherwise as `uniform`."""
        return self._numbers(tf.raw_ops.StatelessRandomNormalV2, layer, shape, dtype, rows_each)

    def dropout(
        self, layer: str, inputs: tf.Tensor, rate: float, noise_shape: Sequence | None = None, rows_each: int | None = 1
    ) -> tf.Tensor:
        """Sets a share `rate` of the inputs to 0 and divides the others by 1 - rate.

        Args:
          layer, rows_each: as for `uniform`.
          inputs: floating point [batch * rows_each, ...].
          rate: 0 < rate < 1.
          noise_shape: of the draws, which are broadcast to the inputs; None is the inputs' size.
        """
        sizes = _sizes(tf.shape(inputs))
        if noise_shape is not None:
            if len(noise_shape) != len(sizes):
                raise errors.GraphError(
                    f"layers.dropout: noise_shape has {len(noise_shape)} sizes for inputs of {len(sizes)}. Give one "
                    "for each dimension, None for the inputs' size."
                )
            sizes = [size if given is None else given for size, given in zip(sizes, noise_shape, strict=True)]
        # In float32 for all inputs, so that each dtype drops the same.
        kept = self.uniform(layer, sizes, rows_each=rows_each) >= rate
        return tf.where(kept, inputs * (1 / (1 - rate)), tf.zeros([], inputs.dtype))

    def _numbers(self, op: Callable, layer: str, shape, dtype: tf.DType, rows_each: int | None) -> tf.Tensor:
        sizes, dtype = _sizes(shape), tf.as_dtype(dtype)
        self._check(layer, sizes, rows_each)
        place, examples, each = self._first, 1, math.prod(sizes)
        if rows_each is None:
            place = self._step
        else:
            examples, each = sizes[0] // rows_each, rows_each * math.prod(sizes[1:])
        outputs = OUTPUTS // 2 if dtype == tf.float64 else OUTPUTS
        counters = -(-each // outputs)
        call, self.names[layer] = self.names[layer], self.names[layer] + 1
        with tf.device(HOST):
            where = philox(f"{self._key} {layer} {call}", tf.cast(place, tf.int64) * tf.cast(counters, tf.int64))
        numbers = op(shape=[examples, counters * outputs], dtype=dtype, **where)
        return tf.reshape(numbers[:, :each], sizes)

    def _check(self, layer: str, sizes: list, rows_each: int | None) -> None:
        if self._is_closed:
            raise errors.GraphError(
                f"{layer} draws again in the backward pass, as tf.recompute_grad does, where its numbers would be "
                "others. Draw outside of the function that is recomputed, and hand the numbers to it."
            )
        if rows_each is None or self._batch is None:
            return
        rows = sizes[0] if sizes else "no"
        if not isinstance(rows, int) or rows != self._batch * rows_each:
            found = (
                f"{rows} rows" if isinstance(rows, int | str) else "a number of rows that is not known before it runs"
            )
            by_rows = isinstance(rows, int) and rows_each == 1 and rows > self._batch and not rows % self._batch
            k = rows // self._batch if by_rows else 0
            raise errors.GraphError(
                f"{layer} draws numbers for each example, and its tensor has {found} for the tower's {self._batch} "
                f"examples{f' with {rows_each} rows each' if rows_each > 1 else ''}. "
                + (f"Give rows_per_example={k} if the {k} rows of an example lie one after the other, else draw"
                   if by_rows else "Draw")
                + " where a row is an example."
            )  # fmt: skip


def check_same(by_tower: Sequence[TowerDraws]) -> tuple[str, ...]:
    """Returns the names of the layers that draw; GraphError if towers' layers differ in this."""
    for i, draws in enumerate(by_tower):
        if draws.names != by_tower[0].names:
            differing = sorted({name for name, _ in draws.names.items() ^ by_tower[0].names.items()})
            raise errors.GraphError(
                f"tower_{i} and tower_0 do not draw alike: {', '.join(differing)}. Let each call of inference and loss "
                "draw the same, and not within a tf.function, which keeps the numbers of the tower that traced it."
            )
    return tuple(by_tower[0].names)


def _sizes(shape) -> list:
    """Returns a shape's sizes: integers, and scalar tensors for those that are not static."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    known = tf.fill(shape, 0).shape  # TensorFlow's own inference, which sees through tf.shape(x)[0] too
    return [shape[i] if size is None else size for i, size in enumerate(known)]
