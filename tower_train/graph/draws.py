"""Random numbers as functions of a key and a position: neither the number of towers nor a restart changes them."""

import collections
import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph import xla
from tower_train.graph.devices import HOST

_PHILOX = 1  # the algorithm's number in tf.random.Algorithm
_ROUNDS = 8  # of the shuffling cipher; the default of 4 leaves many neighbours of 50,000 examples together
OUTPUTS = 4  # 32-bit numbers that one step of Philox's counter gives (Salmon et al. 2011, "Philox4x32")


def random_key(text: str) -> int:
    """Returns the 64-bit key of a name: 0 <= key < 2**64."""
    # not hash(), which differs between processes
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def philox(name: str, counter: tf.Tensor) -> dict:
    """Returns the arguments by which a stateless op draws the numbers of a name from this counter on (int64 scalar, in
    steps of OUTPUTS numbers of 32 bits)."""
    return {
        "key": tf.constant([random_key(name)], tf.uint64),
        "counter": tf.cast(tf.stack([counter, 0]), tf.uint64),
        "alg": _PHILOX,
    }


def shuffled(places: tf.Tensor, sizes: tf.Tensor, epochs: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns where the places of an epoch's order lie before it is shuffled; all int64 [batch], 0 <= place < size."""
    # The cipher uses only the low 8 bits of each of its three seeds (9 above 65,536 examples), so epoch numbers would
    # soon repeat: it gets random ones.
    first = tf.reduce_min(epochs)
    seeds = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.stack([tf.reduce_max(epochs) - first + 1, OUTPUTS]), dtype=tf.uint32, **philox(f"{seed}", first)
    )
    return tf.raw_ops.RandomIndexShuffle(
        index=places,
        seed=tf.gather(seeds[:, :3], epochs - first),
        max_index=sizes - 1,
        rounds=_ROUNDS,
    )


def split_mix(key: int, counters: tf.Tensor) -> tf.Tensor:
    """Draws by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 2.3).

    Args:
      key: where the sequence begins, below 2**64.
      counters: int64 [...], places in it, at least 0.

    Returns:
      float32 [...], multiples of 2^-24, uniform in [0, 1).
    """

    def xor_shifted(bits, shift):
        return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64)))

    bits = tf.constant(key, tf.uint64) + (tf.cast(counters, tf.uint64) + 1) * 0x9E3779B97F4A7C15
    bits = xor_shifted(bits, 30) * 0xBF58476D1CE4E5B9
    bits = xor_shifted(bits, 27) * 0x94D049BB133111EB
    # as many bits as a float32 holds exactly
    highest = tf.bitwise.right_shift(xor_shifted(bits, 31), tf.constant(40, tf.uint64))
    return tf.cast(tf.cast(highest, tf.int32), tf.float32) * 2.0**-24


class Draws:
    """The random numbers of consecutive examples: functions of the seed, a name and the example's position.

    Implements workload.Draws for a workload's augmentation, and draws for its layers. Each example takes as many steps
    of Philox's counter as its numbers need, so a tower's numbers are one section of the numbers of all positions.
    """

    def __init__(
        self,
        seed: int | str,
        first: tf.Tensor | int = 0,
        batch: int | None = None,
        step: tf.Tensor | int = 0,
        locate: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor | None]] | None = None,
        device: str | None = HOST,
    ):
        """Draws for the examples from a position on.

        Args:
          seed: of the training; or a text that separates these numbers from those of training.
          first: int64 scalar, the position of the first example.
          batch: number of examples; None for as many as the layers' tensors have rows.
          step: int64 scalar, the position of the first example of the step, over all towers.
          locate: positions -> (epochs, indices or None), as order.AllExamples; None: the numbers are for layers only.
          device: the place of positions and counters; None in input functions, which a device slows down.
        """
        self._seed, self._first, self._batch, self._step = seed, first, batch, step
        self._device, self._is_closed = device, False
        self.positions = self.epochs = None  # as in workload.Draws; None without `locate`
        self.indices = None  # int64 [batch], the examples at these positions; None for examples in their own order
        # {layer: its number of draws}; each draw of a layer has numbers of its own
        self.names: collections.Counter[str] = collections.Counter()
        if locate:
            with self._aside():
                self.positions = first + tf.range(batch, dtype=tf.int64)
                self.epochs, self.indices = locate(self.positions)

    def uniform(self, name: str, count: int) -> tf.Tensor:
        """As workload.Draws."""
        return self._numbers(tf.raw_ops.StatelessRandomUniformV2, name, self._first, (self._batch, count), tf.float32)

    def per_example(self, name: str, count: int) -> tf.Tensor:
        """As workload.Draws."""
        if self.indices is None:
            raise errors.GraphError(
                f"draws.per_example({name!r}): these examples come in an order of their own, so that none has an index "
                "to draw its numbers by. Use draws.uniform, or examples that are fetched by index."
            )
        with self._aside():  # SplitMix64, as Philox draws consecutive numbers, and indices are not consecutive
            counters = self.indices[:, tf.newaxis] * count + tf.range(count, dtype=tf.int64)
            return split_mix(random_key(f"{self._seed} example {name}"), counters)

    def close(self) -> None:
        """Ends the forward pass: further draws of layers are errors."""
        self._is_closed = True

    def has_row_each(self, shape) -> bool | None:
        """Returns whether a tensor of this shape has a row for each example; False for a scalar or one row, which
        belong to the step, None if rows and examples do not fit."""
        sizes = _sizes(shape)
        if sizes and isinstance(sizes[0], int) and sizes[0] == (self._batch or sizes[0]):
            return True
        return False if sizes[:1] in ([], [1]) else None

    def for_layer(
        self, layer: str, shape, dtype: tf.DType = tf.float32, by_example: bool = True, normal: bool = False
    ) -> tf.Tensor:
        """Draws numbers uniform in [0, 1), or of the normal distribution with mean 0 and standard deviation 1.

        Args:
          layer: its name, the same in all towers.
          shape: of the result, [batch, ...]; integers or an integer tensor.
          dtype: floating point.
          by_example: False if the numbers belong to the step, the same in all towers; `shape` is any then.
          normal: which distribution.

        Raises:
          GraphError: the rows are not those of the tower's examples.
        """
        sizes = _sizes(shape)
        self._check_layer(layer, sizes, by_example)
        first, rows = self._step, (1, math.prod(sizes))
        if by_example:
            first, rows = self._first, (sizes[0], math.prod(sizes[1:]))
        # evaluation's seed is a text, which separates its numbers already
        name = f"layer {layer} {self.names[layer]}" if isinstance(self._seed, int) else f"{layer} {self.names[layer]}"
        self.names[layer] += 1
        op = tf.raw_ops.StatelessRandomNormalV2 if normal else tf.raw_ops.StatelessRandomUniformV2
        return tf.reshape(self._numbers(op, name, first, rows, tf.as_dtype(dtype)), sizes)

    def dropout(
        self, layer: str, inputs: tf.Tensor, rate: float, noise_shape: Sequence | None = None, by_example: bool = True
    ) -> tf.Tensor:
        """Sets a share `rate` of the inputs to 0 and divides the others by 1 - rate.

        Args:
          layer, by_example: as for `for_layer`.
          inputs: floating point [batch, ...].
          rate: 0 < rate < 1.
          noise_shape: of the draws, which are broadcast to the inputs; None is the inputs' size.
        """
        sizes = _sizes(tf.shape(inputs))
        if noise_shape is not None:
            sizes = [size if wanted is None else wanted for size, wanted in zip(sizes, noise_shape, strict=True)]
        # in float32 whatever the inputs are, so that each dtype drops the same
        kept = self.for_layer(layer, sizes, by_example=by_example) >= rate
        return tf.where(kept, inputs * (1 / (1 - rate)), tf.zeros([], inputs.dtype))

    def _numbers(self, op: Callable, name: str, first, shape: tuple, dtype: tf.DType) -> tf.Tensor:
        """Draws [examples, numbers of each] from the position `first` on."""
        examples, each = shape
        outputs = OUTPUTS // 2 if dtype == tf.float64 else OUTPUTS
        counters = -(-each // outputs)
        with self._aside():
            where = philox(f"{self._seed} {name}", tf.cast(first, tf.int64) * tf.cast(counters, tf.int64))
        with xla.not_compiled():
            # each example begins at a counter of its own, so the rest of its last outputs is lost
            return op(shape=[examples, counters * outputs], dtype=dtype, **where)[:, :each]

    @contextlib.contextmanager
    def _aside(self):
        with tf.device(self._device) if self._device else contextlib.nullcontext(), xla.not_compiled():
            yield

    def _check_layer(self, layer: str, sizes: list, by_example: bool) -> None:
        if self._is_closed:
            raise errors.GraphError(
                f"{layer} draws again in the backward pass, as tf.recompute_grad does, where its numbers would be "
                "others. Draw outside of the function that is recomputed, and hand the numbers to it."
            )
        if not by_example or self._batch is None:
            return
        rows = sizes[0] if sizes else "no"
        if not isinstance(rows, int) or rows != self._batch:
            rows = rows if isinstance(rows, int | str) else "an unknown number of"
            raise errors.GraphError(
                f"{layer} draws numbers for each example, and its tensor has {rows} rows for the tower's {self._batch} "
                "examples. Draw where a row is an example."
            )


def _sizes(shape) -> list:
    """Returns a shape's sizes: integers, and scalar tensors for those that are not static."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    known = tf.fill(shape, 0).shape  # TensorFlow's own inference, which sees through tf.shape(x)[0] too
    return [shape[i] if size is None else size for i, size in enumerate(known)]
