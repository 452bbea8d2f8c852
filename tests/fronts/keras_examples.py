"""The smallest programs with the mechanisms of keras.io's examples: {name: Example}."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tower_train import steps

layers, ops = keras.layers, keras.ops
EXAMPLES: dict[str, "Example"] = {}


@dataclasses.dataclass(frozen=True)
class Example:
    build: Callable[[], keras.Model]
    compiled: Callable[[], dict]  # the arguments of its `compile`
    data: Callable[[], dict[str, Any]]  # those of its `fit`
    on_workers: bool = False  # whether two workers train it in a test


def example(compiled, data, on_workers=False):
    """Registers a program by the name of the function that builds its model."""

    def register(build):
        EXAMPLES[build.__name__] = Example(build, compiled, data, on_workers)
        return build

    return register


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def classes(count, kinds, seed=0):
    return np.random.default_rng(seed).integers(0, kinds, count)


def dense(*units, name=None):
    return keras.Sequential([keras.Input([units[0]]), *(layers.Dense(n, "tanh") for n in units[1:])], name=name)


class Distiller(keras.Model):
    """vision/knowledge_distillation.py: a `compute_loss` of its own, which needs the inputs."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense(6, 8, 3), dense(6, 4, 3)
        self.teacher.trainable = False

    def compile(self, distillation_loss_fn, alpha, temperature, **kwargs):
        super().compile(**kwargs)
        self.distillation_loss_fn, self.alpha, self.temperature = distillation_loss_fn, alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = super().compute_loss(x, y, y_pred, sample_weight)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@example(
    lambda: {
        "optimizer": "adam",
        "metrics": [keras.metrics.SparseCategoricalAccuracy()],
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": keras.losses.KLDivergence(),
        "alpha": 0.1,
        "temperature": 10,
    },
    lambda: {"x": numbers(11, 6), "y": classes(11, 3)},
)
def knowledge_distillation():
    """vision/knowledge_distillation.py."""
    return Distiller()


@example(
    lambda: {"optimizer": "rmsprop", "loss": "binary_crossentropy", "metrics": ["accuracy"]},
    lambda: {
        "x": {
            "age": numbers(11, 1),
            "kind": classes([11, 1], 4),
            "word": tf.constant(np.array([b"a", b"b", b"c"], object)[classes([11, 1], 3)]),
        },
        "y": classes(11, 2),
        "sample_weight": np.linspace(0.5, 2, 11),
    },
    on_workers=True,
)
def preprocessing_layers():
    """structured_data/structured_data_classification_from_scratch.py: lookups and crossed features in the model."""
    age, kind = keras.Input([1], name="age"), keras.Input([1], name="kind", dtype="int64")
    word = keras.Input([1], name="word", dtype="string")
    encoded = [
        layers.Normalization(mean=1.0, variance=2.0)(age),
        layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")(age),
        layers.CategoryEncoding(4, output_mode="one_hot")(kind),
        layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(word),
        layers.HashedCrossing(6, output_mode="one_hot")((kind, word)),
    ]
    hidden = layers.Dropout(0.5)(layers.Dense(6, "relu")(layers.concatenate(encoded)))
    return keras.Model({"age": age, "kind": kind, "word": word}, layers.Dense(1, "sigmoid")(hidden))


def update(optimizer, tape, loss, weights):
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Gan(keras.Model):
    """generative/dcgan_overriding_train_step.py and wgan_gp.py."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = dense(6, 5, 1), dense(3, 4, 6)
        self.normalization = layers.BatchNormalization(momentum=0.5)  # of what is made of noise
        self.dropout, self.seeds = layers.Dropout(0.2, seed=1), keras.random.SeedGenerator(1337)
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def scores(self, images):
        return self.discriminator(self.dropout(images, training=True))

    def fakes(self, count):
        noise = keras.random.normal([count, 3], seed=self.seeds)
        return self.normalization(self.generator(noise), training=True)

    def d_loss(self, real, count):
        fake = self.fakes(count)
        labels = ops.concatenate([ops.ones([count, 1]), ops.zeros([count, 1])], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
        loss = ops.mean(ops.square(labels - self.scores(ops.concatenate([fake, real], axis=0))))
        between = real + keras.random.uniform([count, 1], seed=self.seeds) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between)
        norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, [between])[0]), axis=1))
        return loss + 10 * tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        count = tf.shape(real)[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                d_loss = self.d_loss(real, count)
            update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.scores(self.fakes(count)))
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_weights + self.normalization.trainable_weights)
        self.d_loss_metric.update_state(d_loss, sample_weight=count)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": g_loss}


@example(
    lambda: {"d_optimizer": keras.optimizers.Adam(0.01, 0.5), "g_optimizer": keras.optimizers.SGD(0.1)},
    lambda: {"x": numbers(7, 6), "batch_size": 7},
)
def gan():
    """Two optimizers, several steps of a critic, noise, a loss of joined halves, a gradient within a loss."""
    return Gan()


class Contrastive(keras.Model):
    """vision/semisupervised_simclr.py, and after MoCo v3 (Chen et al. 2021, algorithm 1)."""

    def __init__(self):
        super().__init__()
        self.augmenter = keras.Sequential([keras.Input([4]), layers.GaussianNoise(0.1, seed=1)])
        self.encoder, self.target, self.probe = dense(4, 5, 3), dense(4, 5, 3), dense(3, 3)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.hits, self.pairs = (keras.metrics.SparseCategoricalAccuracy(name=name) for name in ("hits", "pairs"))
        self.target.trainable, self.probe_optimizer = False, keras.optimizers.Adam(0.01)

    def similarities(self, first, second):
        return ops.matmul(ops.normalize(first), ops.transpose(ops.normalize(second))) / self.temperature

    def finish(self, places, similarities):
        self.pairs.update_state(places, similarities)
        for slow, fast in zip(self.target.weights, self.encoder.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.temperature.assign(ops.clip(self.temperature, 0.01, 100.0))

    def train_step(self, data):
        x, labels = data
        crossentropy = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)  # by example
        with tf.GradientTape() as tape:
            views = [self.encoder(self.augmenter(x, training=True)) for _ in range(2)]
            first, second, keys, of_all = steps.join((*views, self.target(x) + 0.1 * views[0], x[:, 0]))
            places, similarities = ops.arange(ops.shape(first)[0]), self.similarities(first, second)
            mine, logits = ops.argmax(ops.equal(x[:, :1], of_all[None, :]), axis=1), self.similarities(views[1], keys)
            losses = [crossentropy(places, similarities), crossentropy(mine, logits)]
        self.hits.update_state(mine, logits)
        update(self.optimizer, tape, losses, [*self.encoder.trainable_weights, self.temperature])
        steps.once(lambda: self.finish(places, similarities))
        with tf.GradientTape() as tape:
            probed = crossentropy(labels, self.probe(self.encoder(x)))
        update(self.probe_optimizer, tape, probed, self.probe.trainable_weights)
        return {metric.name: metric.result() for metric in self.metrics}


@example(lambda: {"optimizer": "adam"}, lambda: {"x": numbers(11, 4), "y": classes(11, 3)}, on_workers=True)
def contrastive_and_momentum():
    """Joined rows against each other and against the tower's, losses that are not reduced, an assignment done once."""
    return Contrastive()


class Cycle(keras.Model):
    """generative/cyclegan.py: networks with batch normalisation, each used several times, and a tape for two losses."""

    def __init__(self):
        super().__init__()
        sizes = {"there": 3, "back": 5}
        self.there, self.back = (
            keras.Sequential(
                [keras.Input([4]), layers.Dense(n), layers.BatchNormalization(momentum=0.5), layers.Dense(4)], name=name
            )
            for name, n in sizes.items()
        )

    def compile(self, **optimizers):
        super().compile()
        self.optimizers_of = optimizers

    def train_step(self, data):
        x, y = data
        there, back = functools.partial(self.there, training=True), functools.partial(self.back, training=True)
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = there(x), back(y)
            losses = {
                "there": ops.mean(ops.abs(y - there(fake_x))),
                "back": ops.mean(ops.abs(x - back(fake_y))),
            }
        for name, loss in losses.items():
            update(self.optimizers_of[name], tape, loss, getattr(self, name).trainable_weights)
        return losses


@example(
    lambda: {"there": keras.optimizers.SGD(0.1), "back": keras.optimizers.SGD(0.1)},
    lambda: {"x": numbers(11, 4), "y": numbers(11, 4, seed=1)},
)
def cycle():
    """Means over towers that go back in another order than they came in."""
    return Cycle()
