"""Programs in which MirroredStrategy is wrong or fails, by the issue that tells of them, train here as on one device.

`python tests/fronts/test_mirrored_issues.py` shows both sides: by how much weights differ from one device's. Several
machines (keras#20585), of which test_multi_worker_models.py holds the right side:

    scripts/local_cluster --workers=2 -- python tests/fronts/test_mirrored_issues.py mirrored  # or: towers
"""

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import steps

layers, ops = keras.layers, keras.ops
REPLICAS = ("/cpu:0", "/cpu:1")


def network(last=3):
    return keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), layers.Dense(last)])


def settings(**optimizer):
    return dict(optimizer=keras.optimizers.Adam(0.01, **optimizer), loss="mse")


def numbers(count, width, seed=0):
    return np.random.default_rng(seed).normal(size=[count, width])


def data(**changed):
    return dict(x=numbers(64, 4), y=numbers(64, 3, 1), batch_size=16, epochs=2) | changed


def tensorflow_41657_and_36224():
    """tensorflow#41657, #36224: 65 examples by 16: the last batch has one."""
    return network, settings, data(x=numbers(65, 4), y=numbers(65, 3, 1))


def keras_17429():
    """keras#17429: gradient_accumulation_steps=2."""
    accumulating = lambda: settings(gradient_accumulation_steps=2)  # noqa: E731
    return network, accumulating, data()


class OwnStep(keras.Model):
    """A step of the program's own, as of one device and for towers."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return {"loss": loss}

    def tower_step(self, data):
        x, y = data
        loss = ops.mean(ops.square(self(x, training=True) - y))
        yield steps.Loss(loss)
        return {"loss": loss}


def keras_20164():
    """keras#20164: a train_step whose gradients replicas add, and do not average."""
    sgd = lambda: dict(optimizer=keras.optimizers.SGD(0.1))  # noqa: E731
    return OwnStep, sgd, data()


def dropout():
    """Dropout: replicas draw other numbers than one device."""

    def build():
        middle = [layers.Dense(5, "tanh"), layers.Dropout(0.5, seed=1)]
        return keras.Sequential([keras.Input([4]), *middle, layers.Dense(3)])

    return build, settings, data()


def tensorflow_47344():
    """tensorflow#47344: a loss that compares the examples of a batch."""

    def spread(y, y_pred):
        return ops.mean(ops.square(y - y_pred)) - ops.mean(ops.var(y_pred, axis=0))

    chosen = lambda: settings() | {"loss": spread}  # noqa: E731
    return network, chosen, data()


def tensorflow_33929():
    """tensorflow#33929: clipnorm=, by which each replica clips its part of the gradient."""
    clipping = lambda: settings() | {"optimizer": keras.optimizers.SGD(0.1, global_clipnorm=0.1)}  # noqa: E731
    return network, clipping, data()


def keras_18978():
    """keras#18978: use_ema=True with ema_overwrite_frequency=3."""
    averaging = lambda: settings(use_ema=True, ema_overwrite_frequency=3)  # noqa: E731
    return network, averaging, data()


def masks():
    """Masked steps of sequences, whose number differs between replicas."""

    def build():
        recurrent = layers.SimpleRNN(3, return_sequences=True)
        return keras.Sequential(
            [keras.Input([5], dtype="int32"), layers.Embedding(9, 4, mask_zero=True), recurrent, layers.Dense(1)]
        )

    rng = np.random.default_rng(0)
    words = rng.integers(1, 9, [64, 5]) * (np.arange(5) < rng.integers(1, 6, [64, 1]))
    return build, settings, data(x=words, y=numbers(320, 1).reshape(64, 5, 1))


class Positions(layers.Layer):
    """Adds an embedding of positions."""

    def build(self, shape):
        self.embedding = layers.Embedding(shape[1], 1)
        self.embedding.build([shape[1]])

    def call(self, x):
        return x + self.embedding(ops.arange(x.shape[1]))[:, 0]


def positions():
    """An embedding of positions, as of transformers, whose rows Adam gets once from each replica."""
    build = lambda: keras.Sequential([keras.Input([4]), Positions(), layers.Dense(3)])  # noqa: E731
    return build, settings, data()


def tensorflow_39268():
    """tensorflow#39268: a metric of a whole batch, such as a correlation."""

    def correlation(y, y_pred):
        y, y_pred = y - ops.mean(y), y_pred - ops.mean(y_pred)
        return ops.mean(y * y_pred) / ops.sqrt(ops.mean(y**2) * ops.mean(y_pred**2))

    return network, lambda: settings() | {"metrics": [correlation]}, data()


def sample_weights():
    """Sample weights, over whose sum a loss is a mean: reduction="mean_with_sample_weight"."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return network, lambda: settings() | {"loss": loss}, data(sample_weight=np.abs(numbers(64, 1, 2)[:, 0]))


def dice():
    """keras.losses.Dice and Tversky, which compare all pixels of a batch."""
    masks = (numbers(64, 3, 1) > 0).astype(float)
    sigmoid = lambda: keras.Sequential([keras.Input([4]), layers.Dense(3, "sigmoid")])  # noqa: E731
    return sigmoid, lambda: settings() | {"loss": keras.losses.Dice()}, data(y=masks)


def keras_15593():
    """keras#15593: ragged tensors."""

    class Means(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(6, 3)
            self.embedding.build([None])
            self.built = True

        def call(self, words):
            return tf.reduce_mean(words.with_flat_values(self.embedding(words.flat_values)), axis=1)

    words = tf.ragged.constant([list(range(1, 2 + i % 4)) for i in range(64)], dtype=tf.int32)
    return Means, settings, dict(x=tf.data.Dataset.from_tensor_slices((words, numbers(64, 3, 1))).batch(16))


def sparse_tensors():
    """Sparse tensors."""
    sparse = tf.sparse.from_dense(np.maximum(numbers(64, 4), 0))
    build = lambda: keras.Sequential([keras.Input([4], sparse=True), layers.Dense(3)])  # noqa: E731
    return build, settings, dict(x=tf.data.Dataset.from_tensor_slices((sparse, numbers(64, 3, 1))).batch(16))


def generator():
    """A Python generator, half of whose batches get lost."""
    return (
        network,
        settings,
        dict(x=((numbers(16, 4, i), numbers(16, 3, i)) for i in range(4))),
    )


ISSUES = [
    tensorflow_41657_and_36224, keras_17429, keras_20164, tensorflow_33929, keras_18978, tensorflow_47344,
    tensorflow_39268, keras_15593, sparse_tensors, generator, sample_weights, dice, dropout, masks,
    positions,
]  # fmt: skip


def trained(build, compiled, data, wrap=lambda model: model):
    """Returns the weights of a model that was built, wrapped, compiled and fitted, and its metrics if it has any."""
    keras.utils.set_random_seed(1)
    model = build()
    if not model.built:
        model(data["x"][:1])
    wrapped = wrap(model)
    wrapped.compile(**compiled())
    history = wrapped.fit(**data, shuffle=False, verbose=0).history
    return [*model.get_weights(), *map(np.array, history.values() if "metrics" in compiled() else ())]


def difference(weights, expected):
    return max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("issue", ISSUES)
def test_towers_train_what_one_device_does(float64, issue):
    found = trained(*issue(), lambda model: tower_train.multi_gpu_model(model, gpus=3))
    assert difference(found, trained(*issue())) < 1e-12


def mirrored(build, compiled, data):
    """Returns the weights under MirroredStrategy, or the line with which it fails."""
    strategy = tf.distribute.MirroredStrategy(REPLICAS, tf.distribute.ReductionToOneDevice())
    try:
        with strategy.scope():
            return trained(build, compiled, data)
    except Exception as error:  # whatever it is
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:60]}"


def on_workers(side):
    """Prints by how much the weights that all workers train differ from one device's, or how that fails."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if side == "mirrored" else None
    program = network, settings, data()
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            found = trained(*program, tower_train.multi_gpu_model if side == "towers" else lambda model: model)
        print(f"{side} {difference(found, trained(*program)):.0e}")
    except ValueError as error:
        print(f"{side} ValueError: {str(error)[:40]} ... {str(error)[-90:]}")


def main():
    """Prints a row for each issue."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    if len(sys.argv) > 1:
        return on_workers(sys.argv[1])
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(REPLICAS))
    for issue in ISSUES:
        expected, theirs = trained(*issue()), mirrored(*issue())
        theirs = theirs if isinstance(theirs, str) else f"{difference(theirs, expected):.0e}"
        ours = trained(*issue(), lambda model: tower_train.multi_gpu_model(model, gpus=2))
        print(f"{issue.__doc__.splitlines()[0]} MirroredStrategy {theirs}, two towers {difference(ours, expected):.0e}")


if __name__ == "__main__":
    main()
