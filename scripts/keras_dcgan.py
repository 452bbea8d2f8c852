"""Trains a DCGAN (Radford et al. 2015) on Fashion-MNIST with N GPUs: keras_dcgan.py --num_gpus=2 --data_dir=DIRECTORY

Its custom train_step also runs in Keras on one device. It has two losses with an optimizer each; the second loss uses
the weights that the first has just updated.
"""

import argparse
import os
import pathlib

from tower_train import console
from tower_train.options import command_line

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num_gpus", type=console.count, default=2, help="(%(default)s)")
parser.add_argument("--data_dir", help="where train-images-idx3-ubyte.gz is; without it, 1024 images of random noise")
parser.add_argument("--batch_size", type=console.count, default=128, help="of all GPUs (%(default)s)")
parser.add_argument("--epochs", type=console.count, default=1, help="(%(default)s)")
parser.add_argument("--steps", type=console.count, help="an epoch; all of the data if not given")
parser.add_argument("--pictures", type=pathlib.Path, help="folder for a picture of 64 generated images each epoch")
parser.add_argument("--save", type=pathlib.Path, help="where the generator is saved, *.keras")
options = parser.parse_args()
if options.save and options.save.suffix != ".keras":
    parser.error(f"--save={options.save}: it must be a file *.keras")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers, ops  # noqa: E402

import tower_train  # noqa: E402
from tower_train.data import idx  # noqa: E402

LATENT, SIDE = 64, 8  # numbers from which an image is generated; images per row of a picture


def generator():
    up = {"strides": 2, "padding": "same", "use_bias": False}
    return keras.Sequential(
        [
            keras.Input([LATENT]),
            layers.Dense(7 * 7 * 64, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Reshape((7, 7, 64)),
            layers.Conv2DTranspose(32, 4, **up),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(1, 4, **up),
            layers.Activation("tanh", dtype="float32"),
        ],
        name="generator",
    )


def discriminator():
    down = {"strides": 2, "padding": "same"}
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(32, 4, **down),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Conv2D(64, 4, **down),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1, dtype="float32"),
        ],
        name="discriminator",
    )


class DCGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()
        self.seeds = keras.random.SeedGenerator(0)

    def compile(self):
        super().compile()
        self.g_optimizer, self.d_optimizer = (keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(2))

    def call(self, noise):
        return self.generator(noise)

    def fakes(self, count):
        return self.generator(keras.random.normal([count, LATENT], seed=self.seeds), training=True)

    def train_step(self, images):
        count = ops.shape(images)[0]
        with tf.GradientTape() as tape:
            real_scores = self.discriminator(images, training=True)
            fake_scores = self.discriminator(self.fakes(count), training=True)
            losses = ops.softplus(-real_scores), ops.softplus(fake_scores)  # -log of its probabilities
            d_loss = ops.mean(losses[0]) + ops.mean(losses[1])
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))

        with tf.GradientTape() as tape:
            g_loss = ops.mean(ops.softplus(-self.discriminator(self.fakes(count), training=True)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class Pictures(keras.callbacks.Callback):
    """Writes a picture generated from the same numbers after each epoch."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.noise = np.random.default_rng(0).normal(size=[SIDE * SIDE, LATENT]).astype("float32")

    def on_epoch_end(self, epoch, logs=None):
        images = self.model.generator.predict(self.noise, verbose=0)
        rows = [np.concatenate(images[i : i + SIDE], axis=1) for i in range(0, SIDE * SIDE, SIDE)]
        pixels = np.uint8(127.5 * (np.concatenate(rows) + 1))
        (self.folder / f"epoch-{epoch + 1:03}.png").write_bytes(tf.io.encode_png(pixels).numpy())


def load():
    if not options.data_dir:
        return np.random.default_rng(0).uniform(-1, 1, [1024, 28, 28, 1]).astype("float32")
    images = idx.read(f"{options.data_dir}/train-images-idx3-ubyte.gz")
    return images[..., np.newaxis].astype("float32") / 127.5 - 1


def main(_):
    images = load()
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        gan = DCGAN()
    parallel = tower_train.multi_gpu_model(gan, gpus=options.num_gpus)
    parallel.compile()
    parallel.fit(
        images,
        batch_size=options.batch_size,
        epochs=options.epochs,
        steps_per_epoch=options.steps,
        verbose=2,
        callbacks=[Pictures(options.pictures)] if options.pictures else [],
    )
    if options.save:
        gan.generator.save(options.save)
        print(f"Saved {options.save}. To use it: keras.models.load_model({str(options.save)!r})")
    return 0


if __name__ == "__main__":
    command_line.run(main)  # mistakes end in one line
