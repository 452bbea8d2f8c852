"""Values of the towers of several workers, brought together; a process by itself has them all."""

import enum
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.workers import Workers

_WHOLE = 8  # batches of a series of which workers compare each byte
_SAMPLE = 4096  # numbers of each tensor that they compare of later ones


class Merge(enum.Enum):
    """Ways in which the values of towers, or of workers, become one."""

    ROWS = enum.auto()  # one after the other
    MEAN = enum.auto()  # over the towers' examples; not for workers
    SUM = enum.auto()  # over towers that have examples
    BEFORE = enum.auto()  # the sum over the workers before this one
    CHIEFS = enum.auto()  # the chief's, of its first tower


Exchange = Callable[[Sequence[tuple[Merge, tf.Tensor]]], list[tf.Tensor]]


def alone(local: Sequence[tuple[Merge, tf.Tensor]]) -> list[tf.Tensor]:
    """The Exchange of a process by itself."""
    return [tf.zeros_like(tensor) if way is Merge.BEFORE else tensor for way, tensor in local]


def begin(workers: Workers, series: str, data) -> Exchange:
    """Begins a step once all workers have come to it with the same batch; returns their Exchange, which all must call
    alike.

    Args:
      workers: this worker and the others.
      series: the kind of step.
      data: the whole batch, which each worker has read.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]

    def compare(examples, *arrays):
        batch, number = workers.next_batch(series)
        checksum = functools.reduce(lambda crc, each: zlib.crc32(_bytes(each, number > _WHOLE), crc), arrays, 0)
        workers.gather(batch, **{"the number of examples": int(examples), "the examples' checksum": checksum})
        return [np.int32(examples)]

    _called(compare, [tf.convert_to_tensor(parts.batch_size(data), tf.int32)], leaves)
    return functools.partial(_exchange, workers)


def _bytes(array: np.ndarray, is_sampled: bool) -> bytes:
    if array.dtype == object:  # strings
        return b"\0".join(array.ravel().tolist())
    numbers = np.ravel(array)
    return numbers[:: max(1, numbers.size // _SAMPLE)].tobytes() if is_sampled else numbers.tobytes()


def _exchange(workers: Workers, local: Sequence[tuple[Merge, tf.Tensor]]) -> list[tf.Tensor]:
    for _, tensor in local:
        if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
            raise errors.ConfigError(
                f"The towers of several workers would exchange {getattr(tensor, 'dtype', None)!r} in a "
                f"{type(tensor).__name__}, which workers cannot send to each other. Give labels, weights, joined "
                "tensors and metrics as dense tensors of numbers."
            )
    is_sum = [way is Merge.SUM and tensor.dtype.is_floating for way, tensor in local]
    summed = [tensor for each, (_, tensor) in zip(is_sum, local, strict=True) if each]
    others = [pair for each, pair in zip(is_sum, local, strict=True) if not each]

    def gather(*arrays):
        by_worker = workers.gather("an exchange of a step", arrays)
        ways = zip([way for way, _ in others], zip(*by_worker, strict=True), strict=True)
        return [_merged(way, of_workers, workers.rank) for way, of_workers in ways]

    gathered = iter(_called(gather, [tensor for _, tensor in others]) if others else [])
    sums = iter(_called(lambda *arrays: workers.sum(arrays), summed) if summed else [])
    wholes = [next(sums if each else gathered) for each in is_sum]
    for (way, tensor), whole in zip(local, wholes, strict=True):
        whole.set_shape([None, *tensor.shape[1:]] if way is Merge.ROWS else tensor.shape)
    return wholes


def _merged(way: Merge, of_workers: Sequence[np.ndarray], rank: int) -> np.ndarray:
    if way is Merge.ROWS:
        return np.concatenate(of_workers)
    if way is Merge.CHIEFS:
        return of_workers[0]
    counted = of_workers if way is Merge.SUM else of_workers[:rank]
    return functools.reduce(np.add, counted, np.zeros_like(of_workers[0]))


def _called(function: Callable, tensors: Sequence[tf.Tensor], more: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """Calls a function of arrays in a step; it returns an array for each of `tensors`, with its dtype."""

    def run(*arrays):
        try:
            return function(*arrays)
        except errors.UserError as error:  # which `workers` keeps; TensorFlow logs an error with all that led to it
            raise RuntimeError(str(error)) from None

    return tf.numpy_function(run, [*tensors, *more], [tensor.dtype for tensor in tensors])
