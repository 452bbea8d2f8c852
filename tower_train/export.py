"""Writes a run's newest network as a SavedModel, or Keras model: python -m tower_train.export --train_dir=DIR [options]

The signature serving_default maps raw features to the network's outputs or, if there are class_names, to logits,
probabilities, the names of the most probable classes and the names of all classes; the signature files takes the
contents of image files instead. TensorFlow Serving, tf.saved_model.load and saved_model_cli run them.

With --keras, the network of a workload that has a Keras model is written as model.keras, with the trained weights and
the workload's `prepare` (or without it as model.prepared.keras, if `prepare` is more than a linear map), and as
model.weights.h5; the names of the classes as id2label.json. It returns logits, or probabilities with --probabilities.
Each is loaded again and compared with the run's network.

Exit status: 0 done, 2 an option or a file is wrong.
"""

import pathlib

from tower_train import console
from tower_train.config import ExportOptions
from tower_train.options import command_line


def main(argv) -> int:
    options = command_line.parse(argv, ExportOptions, __doc__)
    console.import_tensorflow()

    import tensorflow as tf

    from tower_train.inference import saved_model

    if options.keras:
        from tower_train.fronts import keras_files

        console.say(*keras_files.export(options, pathlib.Path(str(options.export_dir or options.train_dir))))
        return 0
    tf.get_logger().setLevel("ERROR")  # TensorFlow's functions for SavedModels warn of each other
    exported, signatures = saved_model.export_run(options)
    console.say(f"Exported: {exported} (signatures {', '.join(signatures)})")
    return 0


if __name__ == "__main__":
    command_line.run(main)
