"""python -m tower_train.predict: the classes that a run's network gives image files."""

import numpy as np

from tower_train import console, errors
from tower_train.config import PredictOptions
from tower_train.options import command_line

USAGE = """
Prints the most probable classes of images: python -m tower_train.predict --train_dir=DIR [options] image.jpg ...

Exit status: 0 done, 2 an option or a file is wrong.
"""


def main(argv) -> int:
    options, paths = command_line.parse_with_files(argv, PredictOptions, USAGE)
    if not paths:
        raise errors.ConfigError("No image is named. Give image files after the options.")
    contents = [_read(path) for path in paths]
    command_line.import_tensorflow()
    from tower_train.inference import serving

    built, session = serving.open_run(options)
    with session:
        if built.files is None:
            raise errors.ConfigError(f"--train_dir={options.train_dir}: this run's examples are no images.")
        for path, content in zip(paths, contents, strict=True):
            console.say(f"{path}: {_ranking(path, content, built, session, options.top)}")
    return 0


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise errors.DataError(f"{path}: cannot be read: {error.strerror}.") from None


def _ranking(path: str, content: bytes, built, session, top: int) -> str:
    import tensorflow as tf

    from tower_train.data import remarks

    with remarks.of_decoders() as take_remark:
        try:
            found = session.run(built.outputs["files"], {built.files: [content]})
        except tf.errors.InvalidArgumentError:
            found = None
        remark = take_remark()
    if found is None:
        raise errors.DataError(f"{path}: is no image that can be decoded{f' ({remark})' if remark else ''}.")
    probabilities, names = found["probabilities"][0], found["classes"][0]
    ranks = np.argsort(-probabilities, kind="stable")[:top]
    damaged = f" *** The file is damaged: {remark}." if remark else ""
    return ", ".join(f"{names[i].decode()} {probabilities[i]:.3f}" for i in ranks) + damaged


if __name__ == "__main__":
    command_line.run(main)
