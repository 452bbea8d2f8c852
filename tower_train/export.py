"""python -m tower_train.export: a run's network as a SavedModel."""

import pathlib

from tower_train import console
from tower_train.config import ExportOptions
from tower_train.options import command_line

USAGE = """
Writes a run's newest network as a SavedModel: python -m tower_train.export --train_dir=DIR [options]

Its signature serving_default maps raw features (uint8 images) to logits, probabilities and class names; its signature
files does so from the contents of image files. tf.saved_model.load and saved_model_cli run it.
Exit status: 0 done, 2 an option or a file is wrong.
"""


def main(argv) -> int:
    options = command_line.parse(argv, ExportOptions, USAGE)
    command_line.import_tensorflow()
    import tensorflow as tf

    from tower_train.inference import serving

    tf.get_logger().setLevel("ERROR")  # its functions that write a SavedModel warn of each other
    folder = pathlib.Path(options.export_dir or f"{options.train_dir}/export")
    signatures = serving.export(options, folder)
    console.say(f"Exported: {folder} (signatures {', '.join(signatures)})")
    return 0


if __name__ == "__main__":
    command_line.run(main)
