"""python -m tower_train.predict: a run's predictions for image files or arrays of features."""

import contextlib

import numpy as np

from tower_train import console, errors
from tower_train.config import PredictOptions
from tower_train.inference import example_files
from tower_train.options import command_line

USAGE = """
Prints a network's outputs, or the most probable classes:
python -m tower_train.predict --train_dir=DIR [options] FILE...

A file is an image; or NAME.npy, an array of raw features [examples, ...], like the workload's before `prepare`; or
NAME.npz, several such arrays by the names of an example's features. A line names each file that cannot be used, and the
next ones follow.

Exit status: 0 done, 2 an option or a file is wrong.
"""


def main(argv) -> int:
    options, paths = command_line.parse_with_files(argv, PredictOptions, USAGE)
    if not paths:
        raise errors.ConfigError("No file is named. Give images, or .npy files of features, after the options.")
    for path in paths:
        example_files.read(path)  # reports mistakes before the network is loaded
    command_line.import_tensorflow()
    from tower_train.inference import serving

    built, session = serving.open_run(options)
    status = 0
    with session:
        for path in paths:
            try:
                _predict(path, session, built, options.top)
            except errors.DataError as error:
                status = error.exit_status
                console.notice(console.one_line(f"error: {error}"))
    return status


def _predict(path: str, session, built, top: int) -> None:
    """Prints a line for each example of a file."""
    for names, feed in example_files.batches(path, example_files.read(path), built.files, built.features):
        found, remark = _run(path, session, built, feed)
        for i, name in enumerate(names):
            example = {output: values[i] for output, values in found.items()}
            console.say(f"{name}: {_shown(example, built.class_names, top)}{remark}")


def _run(path: str, session, built, feed: dict) -> tuple[dict[str, np.ndarray], str]:
    """Returns the outputs by name, and a remark to print behind them if an image is damaged."""
    import tensorflow as tf

    from tower_train.data import remarks

    is_image, failure = built.files in feed, None
    with remarks.of_decoders() if is_image else contextlib.nullcontext(lambda: "") as take_remark:
        try:
            outputs = session.run(built.outputs, feed)
        except tf.errors.OpError as error:
            failure = error
        remark = take_remark()
    if isinstance(failure, tf.errors.InvalidArgumentError) and is_image:
        raise errors.DataError(f"{path}: is no image that can be decoded{f' ({remark})' if remark else ''}.")
    if failure:
        raise errors.DataError(f"{path}: the network fails on it: {errors.reason(failure)}.")
    return outputs, f" *** The file is damaged: {remark}." if remark else ""


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
