"""Files with examples to predict on: images, and arrays of raw features. No TensorFlow here."""

import pathlib
from collections.abc import Iterator

import numpy as np

from tower_train import errors
from tower_train.data import decoding

_ARRAYS = (".npy", ".npz")
_BATCH = 256
Content = bytes | dict[str | None, np.ndarray]


def read(path: str) -> Content:
    """Reads a file: the arrays by name of NAME.npz, one array under None of NAME.npy, else the bytes; DataError if it
    cannot be read, or holds no arrays."""
    try:
        if not path.endswith(_ARRAYS):
            return pathlib.Path(path).read_bytes()
        loaded = np.load(path, allow_pickle=False)
        return {None: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # numpy and zipfile raise anything for foreign files
        raise errors.DataError(f"{path}: holds no arrays that numpy can read ({error}).") from None


def batches(path: str, content: Content, files, features: dict) -> Iterator[tuple[list[str], dict]]:
    """Yields the names of some examples and the feed for the inputs of a serving.ServingGraph, `files` and `features`.

    Raises DataError for an image that cannot be decoded or for a network that takes none, or arrays that do not fit.
    """
    if isinstance(content, bytes):
        if files is None:
            wanted = ", ".join(f"{name} {_shape(tensor)}" for name, tensor in features.items())
            raise errors.DataError(
                f"{path}: this run's examples are no images. Give a .npy or .npz file that holds {wanted}."
            )
        [images] = features.values()
        try:
            image = decoding.decode(content, *images.shape[1:])
        except decoding.ImageError as error:
            raise errors.DataError(f"{path}: {error}.") from None
        yield [path], {images: image[np.newaxis]}
        return
    arrays = _by_feature(path, content, features)
    count = len(next(iter(arrays.values())))
    for first in range(0, count, _BATCH):
        names = [f"{path}[{i}]" for i in range(first, min(first + _BATCH, count))]
        yield names, {features[name]: array[first : first + _BATCH] for name, array in arrays.items()}


def _by_feature(path: str, arrays: dict, features: dict) -> dict[str, np.ndarray]:
    """Returns the arrays by the features' names."""
    if list(arrays) == [None] and len(features) == 1:
        arrays = dict(zip(features, arrays.values(), strict=True))
    if set(arrays) != set(features):
        held = ", ".join(str(name or "one array without a name") for name in arrays) or "nothing"
        raise errors.DataError(f"{path}: holds {held}; an example of this run has {', '.join(features)}.")
    for name, array in arrays.items():
        tensor = features[name]
        fits = array.ndim > 0 and tensor.shape[1:].is_compatible_with(array.shape[1:])
        if not fits or not np.can_cast(array.dtype, tensor.dtype.as_numpy_dtype, "same_kind"):
            raise errors.DataError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}; this run's network takes {tensor.dtype.name} "
                f"{_shape(tensor)}."
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise errors.DataError(f"{path}: its arrays hold different numbers of examples: {lengths}.")
    return arrays


def _shape(tensor) -> str:
    return f"[{', '.join(['examples', *(str(size or '?') for size in tensor.shape[1:])])}]"
