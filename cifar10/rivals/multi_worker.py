"""The Keras network under MultiWorkerMirroredStrategy, in a custom training loop.

Keras 3.15's `fit` does not train under that strategy on TensorFlow 2.21: before its first step it averages a batch over
the replicas to learn its shape, which fails with "Attempt to convert a value (PerReplica:...) with an unsupported type"
(keras#20585). This is TensorFlow's guide for custom loops: `strategy.run` of a step that applies gradients with the
Keras optimizer, which averages them between the workers, inside one tf.function.

Otherwise it trains as keras_fit. It reports this worker's own loss, which needs no traffic.
"""

import json
import os
from collections.abc import Callable

import keras
import tensorflow as tf

import cifar10
from cifar10.rivals import keras_fit, keras_networks
from tower_train import workload


def train(request: workload.DataRequest, batch_size: int, after_step: Callable[[float], bool]) -> None:
    """Trains as `Rival.train`, as one of the workers in TF_CONFIG."""
    num_workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras_networks.convnet()
        optimizer = keras_fit.optimizer(cifar10.WORKLOAD.config())
        optimizer.build(model.trainable_variables)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True), True)
            loss = tf.reduce_mean(losses) + tf.add_n(model.losses)
            shared = loss / num_workers  # the optimizer adds the gradients of all replicas
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(shared, weights), weights, strict=True))
        return loss

    @tf.function
    def step(batches):
        return strategy.run(replica_step, next(batches))

    def own_batches(_):
        return keras_fit.distorted_images(request, batch_size // num_workers, cifar10.WORKLOAD.distort)

    batches = iter(strategy.distribute_datasets_from_function(own_batches))
    while not after_step(float(strategy.experimental_local_results(step(batches))[0])):
        pass
