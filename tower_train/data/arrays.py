"""Numpy arrays, and structures of them, as examples that are fetched by index."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tower_train import errors

Arrays = Any  # an array, or a tuple or dict of arrays, whose first dimension counts examples
_UNEVEN = "its rows differ in length. Fill them up to one length."


def as_arrays(values: Arrays, what: str = "an array") -> Arrays:
    """Returns numpy arrays of array-likes, or a dictionary, tuple or Weighted of them; texts become bytes of UTF-8,
    which TensorFlow takes.

    Raises:
      DataError: values that are neither numbers nor texts, both in one array, or rows of different lengths. `what`
        names them.
    """
    if isinstance(values, Mapping):
        return {str(name): as_arrays(value, f"{what} {name}") for name, value in values.items()}
    if hasattr(values, "_fields"):  # Weighted
        return type(values)(*(as_arrays(value, what) for value in values))
    if isinstance(values, tuple) and all(isinstance(value, np.ndarray) and value.ndim for value in values):
        return tuple(as_arrays(value, what) for value in values)
    try:
        array = np.asarray(values.to_list() if isinstance(values, tf.RaggedTensor) else values)
    except ValueError:
        raise errors.DataError(f"{what}: {_UNEVEN}") from None
    return _as_tensors_hold(array, what)


def _as_tensors_hold(array: np.ndarray, what: str) -> np.ndarray:
    """Returns an array in a dtype that TensorFlow has; DataError, that names `what`, if there is none."""
    if array.dtype.kind == "U":
        return np.char.encode(array, "utf-8", "surrogateescape")  # TensorFlow's own conversion takes ASCII only
    if array.dtype == object:
        return _from_objects(array, what)
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        raise errors.DataError(
            f"{what}: {array.dtype} is no type of a tensor. Give numbers, such as the days of a date, or texts."
        ) from None
    return array


def _from_objects(array: np.ndarray, what: str) -> np.ndarray:
    """Returns an array of objects as one of texts or numbers; DataError if it holds both, or neither."""
    values = array.ravel().tolist()
    if any(isinstance(value, np.ndarray | list | tuple) for value in values):
        try:
            return _as_tensors_hold(np.array(array.tolist()), what)
        except ValueError as error:
            raise error if isinstance(error, errors.DataError) else errors.DataError(f"{what}: {_UNEVEN}") from None
    are_texts = [isinstance(value, str | bytes) for value in values]
    are_numbers = [isinstance(value, numbers.Number | np.bool_) for value in values]
    usual, kind = (are_texts, "texts") if sum(are_texts) > len(values) / 2 else (are_numbers, "numbers")
    if False in usual:
        odd = usual.index(False)
        raise errors.DataError(
            f"{what}: {list(map(int, np.unravel_index(odd, array.shape)))} is {errors.described(values[odd])}, among "
            f"{kind}. Fill in what is missing (fillna in pandas), and give texts and numbers as separate arrays, by "
            "name in a dictionary."
        )
    if kind == "texts":
        return _as_tensors_hold(np.array(values).reshape(array.shape), what)
    found = np.array(values).reshape(array.shape)
    return found if found.dtype != object else found.astype(float)  # of Decimal, or beyond 64 bits


def fetcher(*arrays: Arrays) -> Callable[[tf.Tensor], tuple[Any, ...]]:
    """Returns a function from int64 [batch] indices to those rows of every array, or structure of arrays, copied by
    numpy.

    A gather from a tensor takes 0.1 to 0.4 ms less per batch (of 128 to 1024 small images), but tf.data keeps a second
    copy of every tensor that a map function captures.
    """
    arrays = tf.nest.map_structure(lambda a: _from_objects(a, "an array") if a.dtype == object else a, arrays)
    flat = tf.nest.flatten(arrays)

    def take_rows(rows: np.ndarray) -> list[np.ndarray]:
        return [_as_tensors_hold(array[rows], "a batch") for array in flat]

    def fetch(indices: tf.Tensor) -> tuple[Any, ...]:
        dtypes = [tf.as_dtype(array.dtype) for array in flat]
        tensors = tf.numpy_function(take_rows, [indices], dtypes, stateful=False)
        for tensor, array in zip(tensors, flat, strict=True):
            tensor.set_shape(indices.shape + array.shape[1:])
        return tf.nest.pack_sequence_as(arrays, tensors)

    return fetch


def is_pair(batch) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def outside_graph(array: np.ndarray) -> tf.Tensor:
    """Returns an array as a tensor outside of the graph, which is limited to 2 GiB and written to disk."""
    tensor = tf.numpy_function(lambda: array, [], tf.as_dtype(array.dtype), stateful=False)
    return tf.ensure_shape(tensor, array.shape)
