"""Trains Xception or VGG19 on several GPUs with multi_gpu_model, on dummy data, and saves the plain model.

    python scripts/keras_multi_gpu.py --gpus=8

Without GPUs it shows the same on two towers, few small images and one epoch.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tower_train  # noqa: E402

HERE = len(tf.config.list_physical_devices("GPU"))
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--gpus", type=int, default=HERE or 2, help="how many GPUs (%(default)s)")
parser.add_argument("--model", choices=["Xception", "VGG19"], default="Xception")
parser.add_argument("--samples", type=int, default=1000 if HERE else 16)
parser.add_argument("--size", type=int, default=224 if HERE else 71, help="height and width of images (%(default)s)")
parser.add_argument("--classes", type=int, default=1000 if HERE else 10)
parser.add_argument("--epochs", type=int, default=20 if HERE else 1)
parser.add_argument("--batch_size", type=int, default=32 if HERE else 4, help="examples per GPU (%(default)s)")
parser.add_argument("--save", default="my_model.keras", help="where the model is saved (%(default)s)")
options = parser.parse_args()

# The weights live on the CPU, so that each GPU gets them from there.
with tf.device("/cpu:0"):
    model = getattr(keras.applications, options.model)(
        weights=None, input_shape=(options.size, options.size, 3), classes=options.classes
    )

# With one GPU the model itself is trained.
parallel_model = tower_train.multi_gpu_model(model, gpus=options.gpus) if options.gpus > 1 else model
parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

x = np.random.random((options.samples, options.size, options.size, 3)).astype("float32")
y = np.random.random((options.samples, options.classes)).astype("float32")

# batch_size is the global batch: each GPU gets its part of it.
parallel_model.fit(x, y, epochs=options.epochs, batch_size=options.batch_size * options.gpus)

# The model that was given holds the trained weights, and is what to save.
model.save(options.save)
print(f"Saved {options.save}. To use it: keras.models.load_model({options.save!r})")
