"""Trains Xception or VGG19 on several GPUs with multi_gpu_model, on dummy data, and saves the plain model.

    python scripts/keras_multi_gpu.py --gpus=8

Without GPUs it does the same with two towers, a few small images and one epoch.
"""

import argparse
import os

from tower_train import console
from tower_train.options import command_line

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--gpus", type=console.count, help="how many GPUs (all)")
parser.add_argument("--model", choices=["Xception", "VGG19"], default="Xception")
parser.add_argument("--samples", type=console.count, help="number of images (1000; without GPUs 16)")
parser.add_argument("--size", type=console.count, help="height and width of images (224; without GPUs 71)")
parser.add_argument("--classes", type=console.count, help="(1000; without GPUs 10)")
parser.add_argument("--epochs", type=console.count, help="(20; without GPUs 1)")
parser.add_argument("--batch_size", type=console.count, help="examples per GPU (32; without GPUs 4)")
parser.add_argument("--save", default="my_model.keras", help="where the model is saved (%(default)s)")
options = parser.parse_args()  # --help and mistakes are answered before TensorFlow starts
if not options.save.endswith((".keras", ".h5")) or not os.path.isdir(os.path.dirname(options.save) or "."):
    parser.error(f"--save={options.save}: it must be a file *.keras or *.h5 in an existing folder")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tower_train  # noqa: E402
from tower_train import errors  # noqa: E402

HERE = len(tf.config.list_physical_devices("GPU"))
if HERE:
    sizes = {"gpus": HERE, "samples": 1000, "size": 224, "classes": 1000, "epochs": 20, "batch_size": 32}
else:
    sizes = {"gpus": 2, "samples": 16, "size": 71, "classes": 10, "epochs": 1, "batch_size": 4}
parser.set_defaults(**sizes)
options = parser.parse_args()


def main(_):
    # The weights live on the CPU; each GPU copies them from there.
    shape = (options.size, options.size, 3)
    try:
        with tf.device("/cpu:0"):
            model = getattr(keras.applications, options.model)(weights=None, input_shape=shape, classes=options.classes)
    except ValueError as error:
        raise errors.ConfigError(f"--size={options.size}: Keras says: {error}") from None

    # With one GPU the model itself is trained.
    parallel_model = tower_train.multi_gpu_model(model, gpus=options.gpus) if options.gpus > 1 else model
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

    x = np.random.random((options.samples, options.size, options.size, 3)).astype("float32")
    y = np.random.random((options.samples, options.classes)).astype("float32")

    # batch_size is the global batch: each GPU gets its part of it.
    parallel_model.fit(x, y, epochs=options.epochs, batch_size=options.batch_size * options.gpus)

    # The original model holds the trained weights: save this one.
    model.save(options.save)
    print(f"Saved {options.save}. To use it: keras.models.load_model({options.save!r})")
    return 0


if __name__ == "__main__":
    command_line.run(main)  # mistakes end in one line
