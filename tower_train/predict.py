"""Prints a network's outputs, or the most probable classes:
python -m tower_train.predict --train_dir=DIR [options] FILE...

A file is an image; or NAME.npy, an array of raw features [examples, ...], like the workload's before `prepare`; or
NAME.npz, several such arrays by the names of an example's features. Lists of files are not read: for the paths in a
table's first column use `cut -d, -f1 FILE.csv | xargs python -m tower_train.predict --train_dir=DIR`. A line names each
file that cannot be used, and the next ones follow.

Exit status: 0 done, 2 an option or a file is wrong.
"""

from collections.abc import Callable

import numpy as np

from tower_train import console, errors
from tower_train.config import PredictOptions
from tower_train.inference import example_files
from tower_train.options import command_line


def main(argv) -> int:
    paths: list[str] = []
    options = command_line.parse(argv, PredictOptions, __doc__, files=paths)
    if not paths:
        raise errors.ConfigError("No file is named. Give images, or .npy files of features, after the options.")
    used = [path for path in paths if _is_used(example_files.read, path)]  # first, as a network takes seconds to load
    if used:
        console.import_tensorflow()
        from tower_train.inference import serving

        built, session = serving.open_run(options, jit_compile=options.jit_compile)
        with session:
            used = [path for path in used if _is_used(_predict, path, session, built, options.top)]
    return 0 if used == paths else errors.DataError.exit_status


def _is_used(function: Callable, path: str, *args) -> bool:
    """Calls a function with a file; returns False, after a line about it, if it cannot use it."""
    try:
        function(path, *args)
    except errors.DataError as error:
        console.notice(console.one_line(f"error: {error}"))
        return False
    return True


def _predict(path: str, session, built, top: int) -> None:
    """Prints a line for each example of a file."""
    import tensorflow as tf

    for names, feed in example_files.batches(path, example_files.read(path), built.files, built.features):
        try:
            outputs = session.run(built.outputs, feed)
        except tf.errors.OpError as error:
            raise errors.DataError(f"{path}: the network fails on it: {errors.reason(error)}.") from None
        for i, name in enumerate(names):
            example = {output: values[i] for output, values in outputs.items()}
            console.say(f"{name}: {_shown(example, built.class_names, top)}")


def _shown(outputs: dict[str, np.ndarray], class_names: tuple[str, ...], top: int) -> str:
    if class_names:
        ranks = np.argsort(-outputs["probabilities"], kind="stable")[:top]
        return ", ".join(f"{class_names[i]} {outputs['probabilities'][i]:.3f}" for i in ranks)
    texts = {name: _as_text(value) for name, value in outputs.items()}
    return ", ".join(text if len(texts) == 1 else f"{name} {text}" for name, text in texts.items())


def _as_text(value: np.ndarray) -> str:
    text = np.array2string(np.squeeze(value), precision=6, separator=", ", threshold=100, max_line_width=10**6)
    return " ".join(text.split())


if __name__ == "__main__":
    command_line.run(main)
