"""python -m tower_train.predict: what a run's network makes of image files, or of arrays of features."""

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


def main(argv) -> int:
    options, paths = command_line.parse_with_files(argv, PredictOptions, USAGE)
    if not paths:
        raise errors.ConfigError("No file is named. Give images, or .npy files of features, after the options.")
    from tower_train.inference import example_files

    contents = [example_files.read(path) for path in paths]
    command_line.import_tensorflow()
    from tower_train.inference import serving

    built, session = serving.open_run(options)
    with session:
        for path, content in zip(paths, contents, strict=True):
            for names, feed in example_files.batches(path, content, built.files, built.features):
                found, remark = _run(path, session, built, feed)
                for i, name in enumerate(names):
                    example = {output: values[i] for output, values in found.items()}
                    console.say(f"{name}: {_shown(example, built.class_names, options.top)}{remark}")
    return 0


def _run(path: str, session, built, feed: dict) -> tuple[dict[str, np.ndarray], str]:
    """The outputs, and a remark on a damaged image to print behind them."""
    import tensorflow as tf

    from tower_train.data import remarks

    with remarks.of_decoders() as take_remark:
        failure = None
        try:
            outputs = session.run(built.outputs, feed)
        except tf.errors.InvalidArgumentError as error:
            failure = error
        remark = take_remark()
    if failure and built.files in feed:
        raise errors.DataError(f"{path}: is no image that can be decoded{f' ({remark})' if remark else ''}.")
    if failure:
        raise errors.DataError(f"{path}: the network fails on it: {failure.message.splitlines()[0]}.")
    return outputs, f" *** The file is damaged: {remark}." if remark and built.files in feed else ""


def _shown(outputs: dict[str, np.ndarray], class_names: tuple[str, ...], top: int) -> str:
    """One example's outputs in a line."""
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
