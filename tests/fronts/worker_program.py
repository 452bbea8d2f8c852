"""A Keras program that is a worker: python -m worker_program FOLDER trains, and prints what came out.

The chief trains everything once more in this process alone, and prints by how much it differs. All of keras_examples.py
and keras_step_examples.py instead of a few:

    scripts/local_cluster --workers=2 -- python tests/fronts/worker_program.py
"""

import json
import os
import pathlib
import signal
import sys
import zlib

import keras
import numpy as np
import tensorflow as tf
from keras_step_examples import EXAMPLES as OF_KERAS

import tower_train
from tower_train import errors
from tower_train.fronts.lockstep.model import TowerModel

layers, callbacks = keras.layers, keras.callbacks
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
EXAMPLES, BATCH, EPOCHS = 46, 9, 4  # so that an epoch ends with a batch of one
TOWERS = 2
rng = np.random.default_rng(0)
X, Y, WEIGHTS = rng.normal(size=[EXAMPLES, 4]), rng.integers(0, 3, EXAMPLES), rng.random(EXAMPLES)
WORDS = rng.integers(0, 7, [EXAMPLES, 5])
UNSEEDED = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES).batch(BATCH)


class AddsLosses(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(inputs)))
        return inputs


def two_outputs():
    words, features = keras.Input([5], dtype="int32", name="words"), keras.Input([4], name="features")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(7, 3, mask_zero=True)(words))
    hidden = AddsLosses()(layers.concatenate([embedded, features]))
    classes = layers.Dense(3, name="classes", kernel_regularizer="l2")(hidden)
    model = keras.Model({"words": words, "features": features}, [classes, layers.Dense(1, name="number")(hidden)])
    losses = {"classes": CROSS_ENTROPY, "number": "mse"}
    return model, dict(optimizer=keras.optimizers.Adam(0.01), loss=losses, metrics={"classes": "accuracy"})


def with_state():
    middle = [layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), *middle, layers.Dense(3)])
    return model, dict(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), loss=CROSS_ENTROPY, metrics=["accuracy"])


class Trial:
    """A model that all workers train; their initial weights and random states differ."""

    def __init__(self, build, towers=1):
        self.cluster, self._build = tower_train.cluster.current(), build
        self.towers = towers * self.cluster.size
        keras.utils.set_random_seed(self.cluster.rank)
        self.model, compiled = build()
        self.parallel = tower_train.multi_gpu_model(self.model, gpus=towers)
        self.parallel.compile(**compiled)

    def compare(self, name, found, as_towers, **data):
        """Prints what the workers have come to, and in the chief how that differs from what it comes to alone."""
        differences = self._differences(found, as_towers, data) if self.cluster.is_chief else {}
        steps = int(self.parallel.optimizer.iterations.numpy())
        report(name=name, weights=_checksum(self.model.get_weights()), history=found, steps=steps, **differences)

    def _differences(self, found, as_towers, data):
        keras.utils.set_random_seed(0)
        alone, compiled = self._build()
        trained = TowerModel(alone, ("/cpu:0",) * self.towers, "/cpu:0") if as_towers else alone
        trained.compile(**compiled)
        expected = trained.fit(**data, verbose=0).history
        assert {*found} == {*expected}
        pairs = [(a.numpy(), b.numpy()) for a, b in zip(self.model.weights, alone.weights, strict=True)]
        # Of a run that was resumed, from there on.
        histories = [(values, expected[name][-len(values) :]) for name, values in found.items()]
        return {"weights differ by": _largest_difference(pairs), "history differs by": _largest_difference(histories)}


def _checksum(weights):
    return zlib.crc32(b"".join(np.asarray(weight).tobytes() for weight in weights))


def _largest_difference(pairs):
    return max(np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs)


def outputs_and_losses():
    """Trains as plain Keras does, in batches that Keras shuffles."""
    trial = Trial(two_outputs, TOWERS)
    data = dict(x={"words": WORDS, "features": X}, y=[Y, X[:, :1]], sample_weight=[WEIGHTS, WEIGHTS])
    data |= dict(batch_size=BATCH, epochs=EPOCHS)
    trial.compare("two outputs", trial.parallel.fit(**data, verbose=0).history, False, **data)
    return trial, data


def state(folder):
    """Trains two epochs, and once the weights are lost goes on from their backup."""
    trial = Trial(with_state)
    folder = folder / f"of worker {trial.cluster.rank}"
    folder.mkdir()
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    data = dict(x=dataset, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, validation_data=(X, Y, WEIGHTS))
    writers = [callbacks.ModelCheckpoint(folder / "{epoch}.keras"), callbacks.CSVLogger(folder / "log.csv")]
    writers.append(callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False))
    for epochs in (2, EPOCHS):
        history = trial.parallel.fit(**data, epochs=epochs, callbacks=writers, verbose=2).history
        if epochs == 2:
            trial.parallel.set_weights([weight + trial.cluster.rank for weight in trial.parallel.get_weights()])
    trial.compare("with state", history, True, **data, epochs=EPOCHS)
    report(files=sorted(os.listdir(folder)))
    return trial


def on_batch():
    """Trains and evaluates one batch, from the chief's weights; prints by how much numpy differs."""
    cluster, x, y = tower_train.cluster.current(), X[:BATCH], X[:BATCH, :1]
    model = keras.Sequential([keras.Input([4]), layers.Dense(1, use_bias=False)])
    parallel = tower_train.multi_gpu_model(model, gpus=TOWERS)
    parallel.compile(keras.optimizers.SGD(0.25), "mse")
    kernel = model.layers[0].kernel
    before = kernel.numpy()
    kernel.assign_add(cluster.rank * np.ones([4, 1]))
    parallel.train_on_batch(x, y)
    expected = before - 0.25 * 2 / BATCH * x.T @ (x @ before - y)
    loss = parallel.test_on_batch(x, y)
    losses = float(loss), float(np.mean((x @ expected - y) ** 2))
    about = dict(weights=kernel.numpy().tolist(), expected=expected.tolist(), losses=losses)
    report(name="on batch", **about, checked=parallel.check(X, X[:, :1]))


def examples(names):
    """Trains keras.io's examples, and in the chief once more by plain Keras."""
    for name in names:

        def trained(wrap, example=OF_KERAS[name]):
            keras.utils.set_random_seed(1)
            model = example.build()
            wrapped = wrap(model)
            wrapped.compile(**example.compiled())
            wrapped.fit(**example.data(), shuffle=False, verbose=0)
            return model.get_weights()

        weights = trained(lambda model: tower_train.multi_gpu_model(model, gpus=1))
        about = {"weights": _checksum(weights)}
        if tower_train.cluster.current().is_chief:
            expected = trained(lambda model: model)
            about["difference"] = float(_largest_difference(zip(weights, expected, strict=True)))
        report(example=name, **about)


def disagree(trial):
    """Calls fit with arguments or data that differ between the workers."""
    rank = trial.cluster.rank
    pieces = ((X[:9], Y[:9]) for _ in range(3 + rank))  # whose number nobody knows
    another_order = dict(x=X, y=np.roll(Y, rank), shuffle=False, epochs=EPOCHS)
    differing = dict(x=X, y=Y, batch_size=8 + rank), dict(x=X[rank:], y=Y[rank:]), dict(x=pieces, epochs=EPOCHS)
    for data in (*differing, another_order, dict(x=UNSEEDED, epochs=EPOCHS)):
        try:  # Keras goes on counting the epochs of the backup
            trial.parallel.fit(verbose=0, **data)
        except errors.ConfigError as error:
            report(refused=str(error))
    for data in (
        dict(x=X + (np.arange(46) == 40)[:, None] * rank, y=Y, batch_size=46),
        dict(x=X, y=Y, validation_data=(X - rank, Y)),
    ):
        try:
            trial.parallel.fit(verbose=0, shuffle=False, epochs=EPOCHS, **data)
        except errors.ConfigError as error:
            report(other_data=str(error))
    found = trial.parallel.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
    outputs = trial.parallel.predict(X, batch_size=BATCH, verbose=0)
    accuracy = float(np.mean(np.argmax(outputs, axis=1) == Y))
    report(name="evaluated", found=found, accuracy=accuracy)


def die(trial, data):
    def end(epoch, logs):
        if trial.cluster.rank == trial.cluster.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    trial.parallel.fit(**data, verbose=0, callbacks=[callbacks.LambdaCallback(on_epoch_end=end)])


def report(**what):
    print(json.dumps(what), flush=True)


def main(folder=None):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tower_train.cluster.init(gpus=(), worker_timeout_secs=8)
    if folder is None:
        return examples(OF_KERAS)
    disagree(state(pathlib.Path(folder)))
    on_batch()
    examples([name for name, example in OF_KERAS.items() if example.on_workers])
    return die(*outputs_and_losses())


if __name__ == "__main__":
    main(*sys.argv[1:])
