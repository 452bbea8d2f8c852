"""python -m tower_train.predict: what a run's network makes of image files, or of arrays of features."""

from collections.abc import Iterator

import numpy as np

from tower_train import console, errors
from tower_train.config import PredictOptions
from tower_train.options import command_line

USAGE = """
Prints a network's outputs, or the most probable classes:
python -m tower_train.predict --train_dir=DIR [options] FILE ...

A file is an image; or NAME.npy, an array of raw features [examples, ...] as the workload's own are before `prepare`; or
NAME.npz, several such arrays by the names of an example's features.
Exit status: 0 done, 2 an option or a file is wrong.
"""
_ARRAYS = (".npy", ".npz")
_BATCH = 256


def main(argv) -> int:
    options, paths = command_line.parse_with_files(argv, PredictOptions, USAGE)
    if not paths:
        raise errors.ConfigError("No file is named. Give images, or .npy files of features, after the options.")
    contents = [_read_arrays(path) if path.endswith(_ARRAYS) else _read(path) for path in paths]
    command_line.import_tensorflow()
    from tower_train.inference import serving

    built, session = serving.open_run(options)
    with session:
        for path, content in zip(paths, contents, strict=True):
            batches = _of_arrays(path, content, built) if isinstance(content, dict) else _of_file(path, content, built)
            for names, feed in batches:
                found = _run(path, session, built, feed)
                for i, name in enumerate(names):
                    example = {output: values[i] for output, values in found.items()}
                    console.say(f"{name}: {_shown(example, built.class_names, options.top)}")
    return 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None


def _read_arrays(path: str) -> dict[str | None, np.ndarray]:
    """{name: array}; None is the name of the only array of a .npy file."""
    try:
        found = np.load(path, allow_pickle=False)
        return {None: found} if isinstance(found, np.ndarray) else dict(found)
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # whatever numpy and zipfile raise for a file that is none of theirs
        raise errors.DataError(f"{path}: holds no arrays that numpy can read ({error}).") from None


def _of_file(path: str, content: bytes, built) -> Iterator[tuple[list[str], dict]]:
    if built.files is None:
        wanted = ", ".join(f"{name} [examples{_sizes(tensor)}]" for name, tensor in built.features.items())
        raise errors.ConfigError(
            f"{path}: this run's examples are no images. Give a .npy or .npz file that holds {wanted}."
        )
    yield [path], {built.files: [content]}


def _of_arrays(path: str, arrays: dict, built) -> Iterator[tuple[list[str], dict]]:
    """Yields (names of examples, what to feed) batch by batch."""
    if list(arrays) == [None]:
        arrays = dict(zip(built.features, arrays.values(), strict=False))
    if set(arrays) != set(built.features):
        raise errors.DataError(
            f"{path}: holds {', '.join(arrays)}; an example of this run has the features {', '.join(built.features)}."
        )
    for name, array in arrays.items():
        tensor = built.features[name]
        fits = array.ndim > 0 and tensor.shape[1:].is_compatible_with(array.shape[1:])
        if not fits or not np.can_cast(array.dtype, tensor.dtype.as_numpy_dtype, "same_kind"):
            raise errors.DataError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}; this run's network takes {tensor.dtype.name} "
                f"[examples{_sizes(tensor)}]."
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise errors.DataError(f"{path}: its arrays hold different numbers of examples: {lengths}.")
    count = next(iter(lengths.values()))
    for first in range(0, count, _BATCH):
        names = [f"{path}[{i}]" for i in range(first, min(first + _BATCH, count))]
        yield names, {built.features[name]: array[first : first + _BATCH] for name, array in arrays.items()}


def _sizes(tensor) -> str:
    return "".join(f", {size or '?'}" for size in tensor.shape[1:])


def _run(path: str, session, built, feed: dict) -> dict[str, np.ndarray]:
    import tensorflow as tf

    try:
        return session.run(built.outputs, feed)
    except tf.errors.InvalidArgumentError as error:
        if built.files in feed:
            raise errors.DataError(f"{path}: is no JPEG or PNG image that can be decoded.") from None
        raise errors.DataError(f"{path}: the network fails on it: {error.message.splitlines()[0]}.") from None


def _shown(outputs: dict[str, np.ndarray], class_names: tuple[str, ...], top: int) -> str:
    """One example's outputs in a line."""
    if class_names:
        ranks = np.argsort(-outputs["probabilities"], kind="stable")[:top]
        return ", ".join(f"{class_names[i]} {outputs['probabilities'][i]:.3f}" for i in ranks)
    texts = {name: _number(np.squeeze(value)) for name, value in outputs.items()}
    return ", ".join(text if len(texts) == 1 else f"{name} {text}" for name, text in texts.items())


def _number(value: np.ndarray) -> str:
    text = np.array2string(value, precision=6, separator=", ", threshold=100, max_line_width=10**6)
    return " ".join(text.split())


if __name__ == "__main__":
    command_line.run(main)
