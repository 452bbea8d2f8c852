"""Retinal OCT images: the last layers of VGG16, trained as an Estimator on N GPUs from folders of JPEG files.

    python scripts/estimator_retinal_oct.py --num_gpus=2 --data_dir=OCT2017 --weights=imagenet

OCT2017 has the folders {train,test}/{CNV,DME,DRUSEN,NORMAL}; without it, a few files of random noise are written.
"""

import argparse
import glob
import os
import tempfile
import time

from tower_train import console
from tower_train.options import command_line

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num_gpus", type=console.count, default=2, help="(%(default)s)")
parser.add_argument("--data_dir")
parser.add_argument("--weights", help="'imagenet' (downloaded) or a file; without, random ones: no transfer learning")
parser.add_argument("--batch_size", type=console.count, help="examples per GPU (64; without GPUs 8)")
parser.add_argument("--size", type=console.count, help="height and width (224; without GPUs 64)")
parser.add_argument("--epochs", type=console.count, default=1, help="(%(default)s)")
options = parser.parse_args()

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402 - Keras 2, whose models Estimators take

from tower_train import errors  # noqa: E402
from tower_train import estimator as tf_estimator  # noqa: E402

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)  # steps and losses
ON_GPUS = bool(tf.config.list_physical_devices("GPU"))
NUM_GPUS, LABELS = options.num_gpus, ["CNV", "DME", "DRUSEN", "NORMAL"]
BATCH_SIZE = options.batch_size or (64 if ON_GPUS else 8)
SIZE = options.size or (224 if ON_GPUS else 64)
DEVICES = f"{NUM_GPUS} {'GPU' if ON_GPUS else 'CPU tower'}{'s' * (NUM_GPUS > 1)}"


class TimeHistory(tf_estimator.SessionRunHook):
    def begin(self):
        self.times = []

    def before_run(self, run_context):
        self.start = time.time()

    def after_run(self, run_context, run_values):
        self.times.append(time.time() - self.start)


def input_fn(file_pattern, labels, shuffle=False, batch_size=64, num_epochs=None, buffer_size=4096):
    def example(path):
        label = tf.argmax(tf.equal(labels, tf.strings.split(path, os.sep)[-2]))
        image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
        image = tf.image.convert_image_dtype(image, tf.float32)  # 0 to 1
        return tf.image.resize(image, [SIZE, SIZE]), tf.one_hot(label, len(labels))

    files = tf.data.Dataset.list_files(file_pattern, shuffle=shuffle)
    files = (files.shuffle(buffer_size) if shuffle else files).repeat(num_epochs)
    return files.map(example, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(tf.data.AUTOTUNE)


def noise():
    """Writes a few files of random noise; returns their folder."""
    folder = tempfile.mkdtemp()
    for number, (split, label) in enumerate((s, n) for s in ("train", "test") for n in LABELS * 32):
        os.makedirs(f"{folder}/{split}/{label}", exist_ok=True)
        image = tf.cast(tf.random.uniform([62, 64, 1], 0, 256), tf.uint8)
        tf.io.write_file(f"{folder}/{split}/{label}/{number}.jpeg", tf.io.encode_jpeg(image))
    return folder


def main(_):
    folder = options.data_dir or noise()
    train, test = (os.path.join(folder, split, "*", "*.jpeg") for split in ("train", "test"))
    for pattern in (train, test):
        if not glob.glob(pattern):
            raise errors.DataError(f"There are no files {pattern}. Give the folder that has them as --data_dir.")
    try:
        base = keras.applications.VGG16(weights=options.weights, include_top=False, input_shape=(SIZE, SIZE, 3))
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"--size={SIZE} --weights={options.weights}: Keras says: {error}") from None
    for layer in base.layers[:-4]:
        layer.trainable = False
    model = keras.Model(base.input, keras.layers.Dense(4, activation="softmax")(keras.layers.Flatten()(base.output)))
    model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.legacy.Adam(), metrics=["accuracy"])
    config = tf_estimator.RunConfig(num_gpus=NUM_GPUS, log_step_count_steps=1)
    estimator = tf_estimator.model_to_estimator(model, config=config)
    history = TimeHistory()
    estimator.train(lambda: input_fn(train, LABELS, True, BATCH_SIZE, num_epochs=options.epochs), hooks=[history])
    print(f"total time with {DEVICES}: {sum(history.times):.1f} s")
    print(f"{BATCH_SIZE * NUM_GPUS / np.mean(history.times):.0f} images/second with {DEVICES}")
    print(estimator.evaluate(lambda: input_fn(test, LABELS, batch_size=BATCH_SIZE, num_epochs=1)))
    return 0


if __name__ == "__main__":
    command_line.run(main)  # mistakes end in one line
