"""Programs in which MirroredStrategy is wrong or fails, by the issue that tells of them, train here as on one device.

By how much weights differ from one device's, under MirroredStrategy and in towers:

    python tests/fronts/test_mirrored_issues.py
    scripts/local_cluster --workers=2 -- python tests/fronts/test_mirrored_issues.py  # keras#20585, several machines
"""

import functools
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_examples import numbers

import tower_train

layers, ops, optimizers = keras.layers, keras.ops, keras.optimizers
use = functools.partial
REPLICAS = ("/cpu:0", "/cpu:1")
ADAM, SGD = use(optimizers.Adam, 0.01), use(optimizers.SGD, 0.1)
WHOLE = dict(make=ADAM, epochs=2)  # of a program whose issue concerns neither optimizer nor epochs
BRIEF = dict(make=SGD, epochs=1)  # in its place in tests, which take a third of the time so


def data(**changed):
    return dict(x=numbers(64, 4), y=numbers(64, 3, seed=1), batch_size=16, epochs=WHOLE["epochs"]) | changed


def batched(x):
    return dict(x=tf.data.Dataset.from_tensor_slices((x, numbers(64, 3, seed=1))).batch(16))


def settings(loss="mse", make=None, metrics=None, **of_optimizer):
    return dict(optimizer=(make or WHOLE["make"])(**of_optimizer), loss=loss, metrics=metrics)


def network(*middle, last=3, activation=None):
    made = (layer() for layer in middle)
    return keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), *made, layers.Dense(last, activation)])


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def own_step():
    made = network()
    return OwnStep(made.inputs, made.outputs)


class Ragged(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(6, 3)
        self.embedding.build([None])
        self.built = True

    def call(self, words):
        return tf.reduce_mean(words.with_flat_values(self.embedding(words.flat_values)), axis=1)


class Positions(layers.Layer):
    def build(self, shape):
        self.embedding = layers.Embedding(shape[1], 1)
        self.embedding.build([shape[1]])

    def call(self, x):
        return x + self.embedding(ops.arange(x.shape[1]))[:, 0]


def masked():
    embedding = layers.Embedding(9, 4, mask_zero=True)
    recurrent = layers.SimpleRNN(3, return_sequences=True)
    return keras.Sequential([keras.Input([5], dtype="int32"), embedding, recurrent, layers.Dense(1)])


def words_of_any_length():
    rng = np.random.default_rng(0)
    return rng.integers(1, 9, [64, 5]) * (np.arange(5) < rng.integers(1, 6, [64, 1]))


def spread(y, y_pred):
    return ops.mean(ops.square(y - y_pred)) - ops.mean(ops.var(y_pred, axis=0))


def correlation(y, y_pred):
    y, y_pred = y - ops.mean(y), y_pred - ops.mean(y_pred)
    return ops.mean(y * y_pred) / ops.sqrt(ops.mean(y**2) * ops.mean(y_pred**2))


def case(build=network, compiled=settings, fitted=data):
    """(builds the model, the arguments of compile, those of fit)"""
    return build, compiled, fitted


ISSUES = {
    "tensorflow#41657, #36224: 65 examples by 16: the last batch has one": case(
        fitted=lambda: data(x=numbers(65, 4), y=numbers(65, 3, seed=1))
    ),
    "tensorflow#45594: a batch with fewer examples than replicas": case(
        fitted=lambda: dict(x=tf.data.Dataset.from_tensors((numbers(1, 4), numbers(1, 3))))
    ),
    "keras#17429: gradient_accumulation_steps=2": case(compiled=use(settings, gradient_accumulation_steps=2)),
    "keras#20164: a train_step whose gradients replicas add, and do not average": case(
        own_step, use(settings, loss=None, make=SGD)
    ),
    "tensorflow#47344: a loss that compares the examples of a batch": case(compiled=use(settings, spread)),
    "tensorflow#33929: global_clipnorm=, by which each replica clips its part": case(
        compiled=use(settings, make=SGD, global_clipnorm=0.1)
    ),
    "keras#18978: use_ema=True with ema_overwrite_frequency=3": case(
        compiled=use(settings, use_ema=True, ema_overwrite_frequency=3)
    ),
    "tensorflow#39268: a metric of a whole batch, such as a correlation": case(
        compiled=use(settings, metrics=[correlation])
    ),
    "keras#15593: ragged tensors": case(
        Ragged,
        fitted=lambda: batched(tf.ragged.constant([list(range(1, 2 + i % 4)) for i in range(64)], dtype=tf.int32)),
    ),
    "sparse tensors": case(
        lambda: keras.Sequential([keras.Input([4], sparse=True), layers.Dense(3)]),
        fitted=lambda: batched(tf.sparse.from_dense(np.maximum(numbers(64, 4), 0))),
    ),
    "a Python generator, half of whose batches get lost": case(
        fitted=lambda: dict(x=((numbers(16, 4, seed=i), numbers(16, 3, seed=i)) for i in range(4)))
    ),
    "reduction=mean_with_sample_weight": case(
        compiled=lambda: settings(keras.losses.MeanSquaredError("mean_with_sample_weight")),
        fitted=lambda: data(sample_weight=np.abs(numbers(64, seed=2))),
    ),
    "keras.losses.Dice and Tversky, which compare all pixels of a batch": case(
        use(network, activation="sigmoid"),
        lambda: settings(keras.losses.Dice()),
        lambda: data(y=(numbers(64, 3, seed=1) > 0).astype(float)),
    ),
    "dropout, of which replicas draw other numbers": case(lambda: network(lambda: layers.Dropout(0.5, seed=1))),
    "steps of sequences that are masked, whose number differs between replicas": case(
        masked, fitted=lambda: data(x=words_of_any_length(), y=numbers(64, 5, 1))
    ),
    "an embedding of positions, whose rows Adam gets once from each replica": case(
        lambda: keras.Sequential([keras.Input([4]), Positions(), layers.Dense(3)]), use(settings, make=ADAM)
    ),
}


def trained(build, compiled, fitted, wrap=lambda model: model):
    """Returns the weights of a model that was built, wrapped, compiled and fitted, and its metrics if it has any."""
    keras.utils.set_random_seed(1)
    model, arguments = build(), compiled()
    if not model.built:
        model(fitted()["x"][:1])
    wrapped = wrap(model)
    wrapped.compile(**arguments)
    is_plain = wrapped is model and not tf.distribute.has_strategy()
    model.run_eagerly = is_plain  # in which a few steps take less time than to trace one
    history = wrapped.fit(**fitted(), shuffle=False, verbose=0).history
    return [*model.get_weights(), *map(np.array, history.values() if arguments["metrics"] else ())]


def difference(weights, expected):
    return max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("issue", ISSUES)
def test_towers_train_what_one_device_does(float64, issue, monkeypatch):
    for name, value in BRIEF.items():
        monkeypatch.setitem(WHOLE, name, value)
    found = trained(*ISSUES[issue], lambda model: tower_train.multi_gpu_model(model, gpus=3))
    assert difference(found, trained(*ISSUES[issue])) < 1e-12


def mirrored(strategy, program):
    """Returns by how much weights under a strategy differ from one device's, or the line with which it fails."""
    try:
        with strategy.scope():
            found = trained(*program)
        return f"{difference(found, trained(*program)):.0e}"
    except Exception as error:  # whatever it is
        line = str(error).strip().splitlines()[0]
        return f"{type(error).__name__}: {line[:60]} ... {line[-60:]}"


def main(side=None):
    """Prints a row for each issue; of several workers, that of several machines."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    several = case()
    if side:
        print(f"MultiWorkerMirroredStrategy {mirrored(tf.distribute.MultiWorkerMirroredStrategy(), several)}")
    elif "TF_CONFIG" in os.environ:
        subprocess.run([sys.executable, __file__, "theirs"], check=True)  # which needs the same ports
        print(f"two workers {difference(trained(*several, tower_train.multi_gpu_model), trained(*several)):.0e}")
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(REPLICAS))
        for issue, program in ISSUES.items():
            theirs = mirrored(tf.distribute.MirroredStrategy(REPLICAS, tf.distribute.ReductionToOneDevice()), program)
            ours = trained(*program, lambda model: tower_train.multi_gpu_model(model, gpus=2))
            print(f"{issue}: MirroredStrategy {theirs}, two towers {difference(ours, trained(*program)):.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
