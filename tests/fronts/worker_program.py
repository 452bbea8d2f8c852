"""A Keras program that is a worker: python tests/fronts/worker_program.py FOLDER trains, and prints what came out.

The chief trains everything once more in this process alone, and prints by how much it differs. All of keras_examples.py
instead of a few:

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
from keras_examples import EXAMPLES as OF_KERAS
from keras_twins import CROSS_ENTROPY

import tower_train
from tower_train import errors

layers, callbacks = keras.layers, keras.callbacks
EXAMPLES, BATCH, EPOCHS = 19, 9, 4  # so that an epoch ends with a batch of one
TOWERS = 2
rng = np.random.default_rng(0)
X, Y, WEIGHTS = rng.normal(size=[EXAMPLES, 4]), rng.integers(0, 3, EXAMPLES), rng.random(EXAMPLES)
WORDS = rng.integers(0, 7, [EXAMPLES, 5])


class AddsLosses(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(inputs)))
        return inputs


def build():
    words, features = keras.Input([5], dtype="int32", name="words"), keras.Input([4], name="features")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(7, 3, mask_zero=True)(words))
    hidden = AddsLosses()(layers.BatchNormalization()(layers.concatenate([embedded, features])))
    classes = layers.Dense(3, name="classes", kernel_regularizer="l2")(layers.Dropout(0.3)(hidden))
    model = keras.Model({"words": words, "features": features}, [classes, layers.Dense(1, name="number")(hidden)])
    losses = {"classes": CROSS_ENTROPY, "number": "mse"}
    return model, dict(optimizer=keras.optimizers.Adam(0.01), loss=losses, metrics={"classes": "accuracy"})


def examples_of(features=X, classes=Y):
    return dict(x={"words": WORDS[: len(features)], "features": features}, y=[classes, features[:, :1]])


UNSEEDED = tf.data.Dataset.from_tensor_slices((examples_of()["x"], (Y, X[:, :1]))).shuffle(EXAMPLES).batch(BATCH)


def in_towers(model):
    """Returns a model's towers, one in each worker; those of `on_batch` are compared with one device."""
    return tower_train.multi_gpu_model(model, gpus=1, check_towers="never")


def shared_model():
    """Returns a model that all workers train; their initial weights and random states differ."""
    keras.utils.set_random_seed(tower_train.cluster.current().rank)
    template, compiled = build()
    parallel = in_towers(template)
    parallel.compile(**compiled)
    return parallel


def differences(parallel, found, **data):
    """Returns by how much weights and the end of a history differ from those of Keras on one device."""
    keras.utils.set_random_seed(0)
    alone, compiled = build()
    alone.compile(**compiled)
    expected = alone.fit(**data, verbose=0).history
    assert {*found} == {*expected}
    pairs = zip(parallel.template.get_weights(), alone.get_weights(), strict=True)
    histories = [(values, expected[name][-len(values) :]) for name, values in found.items()]
    return {"weights differ by": _largest_difference(pairs), "history differs by": _largest_difference(histories)}


def _checksum(weights):
    return zlib.crc32(b"".join(np.asarray(weight).tobytes() for weight in weights))


def _largest_difference(pairs):
    return max(np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs)


def state(folder):
    """Trains two epochs, and once the weights are lost goes on from their backup."""
    cluster, parallel = tower_train.cluster.current(), shared_model()
    folder = folder / f"of worker {cluster.rank}"
    folder.mkdir()
    x, y = examples_of().values()
    weights = (WEIGHTS, WEIGHTS[::-1])
    shuffled = tf.data.Dataset.from_tensor_slices((x, tuple(y), weights)).shuffle(EXAMPLES, None, False)  # noqa: FBT003
    data = dict(x=shuffled.batch(BATCH), validation_data=(x, y))
    writers = [callbacks.ModelCheckpoint(folder / "{epoch}.keras"), callbacks.CSVLogger(folder / "log.csv")]
    writers.append(callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False))
    for epochs in (2, EPOCHS):
        history = parallel.fit(**data, epochs=epochs, callbacks=writers, verbose=2).history
        if epochs == 2:
            parallel.set_weights([weight + cluster.rank for weight in parallel.get_weights()])
    trained = dict(weights=_checksum(parallel.get_weights()), history=history, steps=int(parallel.optimizer.iterations))
    of_chief = differences(parallel, history, **data, epochs=EPOCHS) if cluster.is_chief else {}
    report(name="trained", **trained, **of_chief)
    report(files=sorted(os.listdir(folder)))
    return parallel


class Sums(keras.Sequential):
    """Adds up what it saw in a variable of TensorFlow."""

    def train_step(self, data):
        self.seen.assign_add(tf.reduce_mean(data[0]))
        return super().train_step(data)


def on_batch():
    """Trains and evaluates one batch, from the chief's values; prints by how much numpy differs."""
    cluster, x, y = tower_train.cluster.current(), X[:BATCH], X[:BATCH, :1]
    model = Sums([keras.Input([4]), layers.Dense(1, use_bias=False)])
    model.seen = tf.Variable(5.0 + cluster.rank, dtype=tf.float64)
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
    about["seen"] = float(model.seen.numpy()), 5 + np.mean(x)
    report(name="on batch", **about, checked=parallel.check(X, X[:, :1]))


def examples(names):
    """Trains keras.io's examples, and in the chief once more by plain Keras."""
    for name in names:

        def trained(wrap, example=OF_KERAS[name]):
            keras.utils.set_random_seed(1)
            model = example.build()
            wrapped = wrap(model)
            wrapped.compile(**example.compiled())
            model.run_eagerly = wrapped is model  # a few steps take less time than to trace one
            wrapped.fit(**example.data(), verbose=0)  # shuffled, as Keras does
            return model.get_weights()

        weights = trained(in_towers)
        about = {"weights": _checksum(weights)}
        if tower_train.cluster.current().is_chief:
            expected = trained(lambda model: model)
            about["difference"] = float(_largest_difference(zip(weights, expected, strict=True)))
        report(example=name, **about)


def disagree(parallel):
    """Calls fit with arguments or data that differ between the workers."""
    rank = tower_train.cluster.current().rank
    first = tuple(examples_of(X[:9], Y[:9]).values())
    pieces = ((first[0], tuple(first[1])) for _ in range(3 + rank))  # whose number nobody knows
    one_image = X + (np.arange(EXAMPLES) == 15)[:, None] * rank
    for given in (
        examples_of() | dict(batch_size=8 + rank),
        dict(x=pieces),
        dict(x=UNSEEDED),
        examples_of() | dict(x={"words": WORDS, "features": one_image}, shuffle=False, batch_size=EXAMPLES),
        examples_of() | dict(validation_data=tuple(examples_of(X - rank).values()), shuffle=False),
    ):
        try:
            parallel.fit(verbose=0, epochs=EPOCHS, **given)  # Keras goes on counting the epochs of the backup
        except errors.ConfigError as error:
            report(refused=str(error))
    found = parallel.evaluate(**examples_of(), batch_size=BATCH, verbose=0, return_dict=True)
    outputs, _ = parallel.predict(examples_of()["x"], batch_size=BATCH, verbose=0)
    report(name="evaluated", found=found, accuracy=float(np.mean(np.argmax(outputs, axis=1) == Y)))


def die(parallel):
    def end(epoch, logs):
        if not tower_train.cluster.current().is_chief:
            os.kill(os.getpid(), signal.SIGKILL)

    ending = callbacks.LambdaCallback(on_epoch_end=end)
    parallel.fit(**examples_of(), verbose=0, epochs=2 * EPOCHS, callbacks=[ending])


def report(**what):
    print(json.dumps(what), flush=True)


def main(folder=None):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tower_train.cluster.init(gpus=(), worker_timeout_secs=5)
    if folder is None:
        return examples(OF_KERAS)
    disagree(parallel := state(pathlib.Path(folder)))
    on_batch()
    examples([name for name, example in OF_KERAS.items() if example.on_workers])
    return die(parallel)


if __name__ == "__main__":
    main(*sys.argv[1:])
