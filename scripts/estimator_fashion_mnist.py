"""Fashion-MNIST as an Estimator on N GPUs, timed: estimator_fashion_mnist.py --num_gpus=2 --data_dir=DIRECTORY"""

import argparse
import os
import time

from tower_train import console
from tower_train.options import command_line

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--num_gpus", type=console.count, default=2, help="(%(default)s)")
parser.add_argument("--data_dir", help="where the four .gz files are; without it, images are random noise")
parser.add_argument("--batch_size", type=console.count, default=512, help="examples per GPU (%(default)s)")
parser.add_argument("--epochs", type=console.count, help="(5; without GPUs 1)")
options = parser.parse_args()

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402 - Keras 2, whose models Estimators take

from tower_train import estimator as tf_estimator  # noqa: E402
from tower_train.data import idx  # noqa: E402

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)  # steps and losses
ON_GPUS = bool(tf.config.list_physical_devices("GPU"))
NUM_GPUS, BATCH_SIZE = options.num_gpus, options.batch_size
EPOCHS = options.epochs or (5 if ON_GPUS else 1)
DEVICES = f"{NUM_GPUS} {'GPU' if ON_GPUS else 'CPU tower'}{'s' * (NUM_GPUS > 1)}"


class TimeHistory(tf_estimator.SessionRunHook):
    def begin(self):
        self.times = []

    def before_run(self, run_context):
        self.start = time.time()

    def after_run(self, run_context, run_values):
        self.times.append(time.time() - self.start)


def load(split, count):
    if not options.data_dir:
        return np.random.rand(count, 28, 28, 1).astype("float32"), np.eye(10, dtype="float32")[np.arange(count) % 10]
    read = [idx.read(f"{options.data_dir}/{split}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")]
    return read[0][..., np.newaxis].astype("float32") / 255, np.eye(10, dtype="float32")[read[1]]


def input_fn(images, labels, epochs, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.shuffle(5000).repeat(epochs).batch(batch_size).prefetch(2)


def main(_):
    inputs, layers = keras.Input(shape=(28, 28, 1)), keras.layers
    conv, pool = {"kernel_size": 3, "activation": "relu"}, layers.MaxPooling2D(2)
    x = layers.Conv2D(64, **conv)(pool(layers.Conv2D(64, **conv)(pool(layers.Conv2D(32, **conv)(inputs)))))
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.legacy.Adam(0.001), metrics=["accuracy"])
    estimator = tf_estimator.model_to_estimator(model, config=tf_estimator.RunConfig(num_gpus=NUM_GPUS))
    history = TimeHistory()
    estimator.train(lambda: input_fn(*load("train", 6000), EPOCHS, BATCH_SIZE), hooks=[history])
    print(f"total time with {DEVICES}: {sum(history.times):.1f} s")
    print(f"{BATCH_SIZE * NUM_GPUS / np.mean(history.times):.0f} images/second with {DEVICES}")
    print(estimator.evaluate(lambda: input_fn(*load("t10k", 1000), 1, BATCH_SIZE)))
    return 0


if __name__ == "__main__":
    command_line.run(main)  # mistakes end in one line
