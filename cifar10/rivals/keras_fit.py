"""The same network as a Keras model, trained as tower_train does.

On images in memory, augmented in whole batches by the same function in a parallel `map`; with weight decay, and SGD,
moving averages and label smoothing by the same recipe; at its initial learning rate, without Muon, which would cost
time, and without rates of single variables, for which Keras has no option.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

import cifar10
import tower_train
from cifar10 import cifar10_94, records, source, whitening
from cifar10.rivals import keras_networks
from tower_train import workload
from tower_train.bench import keras_fit
from tower_train.options import rules


def train(
    request: workload.DataRequest, batch_size: int, after_step: Callable[[float], bool], model: str = "convnet", **how
) -> None:
    """Fits one of the workload's networks as `Side.train`; `how` are arguments of keras_fit.fit."""
    ours = cifar10.WORKLOAD.with_options({"model": model})
    data = records.read_split(source.locate(request)[0], "train")

    def make_model():
        recipe, network = ours.config(), keras_networks.NETWORKS[model]()
        if any(layer.name == keras_networks.WHITENING for layer in network.layers):
            kernels = whitening.kernels(data.images[: cifar10_94.WHITENED_IMAGES])
            network.get_layer(keras_networks.WHITENING).kernel.assign(kernels)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=recipe.label_smoothing)
        return network, {"optimizer": optimizer(recipe), "loss": loss}

    def prepared(images, labels):
        return ours.augment(images, _Draws(batch_size)), tf.one_hot(labels, records.NUM_CLASSES)

    def make_batches():
        images = tf.data.Dataset.from_tensor_slices((data.images, data.labels)).shuffle(len(data.labels)).repeat()
        batches = images.batch(batch_size, drop_remainder=True)
        return batches.map(prepared, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    keras_fit.fit(make_model, make_batches, after_step, **how)


def optimizer(recipe: tower_train.Config) -> keras.optimizers.SGD:
    """Makes the SGD of a model's recipe."""
    start = rules.parse_points(recipe.lr_points)[0][1] if recipe.lr_points else 1.0
    return keras.optimizers.SGD(
        start * recipe.learning_rate,
        momentum=recipe.momentum if recipe.optimizer in ("momentum", "muon") else 0.0,
        nesterov=recipe.nesterov,
        use_ema=recipe.ema > 0,
        ema_momentum=recipe.ema,
    )


class _Draws:
    """A `workload.Draws` without positions: new numbers at every call, as is usual with Keras."""

    def __init__(self, batch: int):
        self._batch = batch
        self.epochs = tf.zeros([batch], tf.int64)

    def uniform(self, name: str, count: int) -> tf.Tensor:
        del name
        return tf.random.uniform([self._batch, count])

    per_example = uniform
