"""The smallest programs with the mechanisms of keras.io's examples that have a training step of their own."""

import keras
import numpy as np
import tensorflow as tf
from keras_examples import EXAMPLES, classes, dense, example, numbers

from tower_train import steps

__all__ = ["EXAMPLES", "OneDevice"]
layers, ops = keras.layers, keras.ops


class OneDevice:
    """A model whose `train_step` does what its `tower_step` asks for, by GradientTapes on one device."""

    def train_step(self, data):
        requests, answer = self.tower_step(data), None
        while True:
            losses = []
            with tf.GradientTape(persistent=True) as tape:
                try:
                    while isinstance(request := requests.send(answer), steps.Join):
                        answer = request.tensors
                except StopIteration as end:
                    return end.value
                if not isinstance(request, steps.Once):
                    losses = request if isinstance(request, list) else [request]
                    scaled = [(each.optimizer or self.optimizer).scale_loss(each.value) for each in losses]
            answer = None if losses else request.function()
            trained = [self.trainable_weights if each.variables is None else each.variables for each in losses]
            of_losses = [tape.gradient(*pair) for pair in zip(scaled, trained, strict=True)] if losses else []
            for loss, grads, variables in zip(losses, of_losses, trained, strict=True):
                (loss.optimizer or self.optimizer).apply_gradients(zip(grads, variables, strict=True))


class Dcgan(OneDevice, keras.Model):
    """generative/dcgan_overriding_train_step.py."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input([8, 8, 1]), layers.Conv2D(3, 4, strides=2, padding="same"), layers.LeakyReLU(0.2),
             layers.Flatten(), layers.Dropout(0.2, seed=1), layers.Dense(1, "sigmoid")]
        )  # fmt: skip
        self.generator = keras.Sequential(
            [keras.Input([5]), layers.Dense(4 * 4 * 2), layers.Reshape([4, 4, 2]),
             layers.Conv2DTranspose(3, 4, strides=2, padding="same"), layers.LeakyReLU(0.2),
             layers.Conv2D(1, 5, padding="same", activation="sigmoid")]
        )  # fmt: skip
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def d_loss(self, real):
        count = ops.shape(real)[0]
        generated = self.generator(keras.random.normal([count, 5], seed=self.seed_generator))
        labels = ops.concatenate([ops.ones([count, 1]), ops.zeros([count, 1])], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        return self.loss_fn(labels, self.discriminator(ops.concatenate([generated, real], axis=0), training=True))

    def g_loss(self, count):
        noise = keras.random.normal([count, 5], seed=self.seed_generator)
        return self.loss_fn(ops.zeros([count, 1]), self.discriminator(self.generator(noise), training=True))

    def tower_step(self, real):
        count = tf.shape(real)[0]
        d_loss = self.d_loss(real)
        yield steps.Loss(d_loss, self.discriminator.trainable_weights, self.d_optimizer)
        g_loss = self.g_loss(count)
        yield steps.Loss(g_loss, self.generator.trainable_weights, self.g_optimizer)
        self.d_loss_metric.update_state(d_loss, sample_weight=count)
        self.g_loss_metric.update_state(g_loss, sample_weight=count)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@example(
    lambda: {
        "d_optimizer": keras.optimizers.Adam(1e-3),
        "g_optimizer": keras.optimizers.Adam(1e-3),
        "loss_fn": keras.losses.BinaryCrossentropy(),
    },
    lambda: {"x": tf.data.Dataset.from_tensor_slices(np.tanh(numbers(11, 8, 8, 1)) ** 2).batch(7)},
)
def dcgan():
    """generative/dcgan_overriding_train_step.py: two optimizers, noise, a loss of joined halves."""
    return Dcgan()


class WganGp(OneDevice, keras.Model):
    """generative/wgan_gp.py."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = dense(6, 5, 1), dense(3, 4, 6)
        self.seeds = keras.random.SeedGenerator(1)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def fakes(self, real):
        return self.generator(keras.random.normal([tf.shape(real)[0], 3], seed=self.seeds), training=True)

    def d_loss(self, real):
        fake = self.fakes(real)
        fake_logits, real_logits = self.discriminator(fake, training=True), self.discriminator(real, training=True)
        between = real + keras.random.uniform([tf.shape(real)[0], 1], seed=self.seeds) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between, training=True)
        norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, [between])[0]), axis=1))
        return tf.reduce_mean(fake_logits) - tf.reduce_mean(real_logits) + 10 * tf.reduce_mean((norm - 1.0) ** 2)

    def tower_step(self, real):
        for _ in range(3):
            d_loss = self.d_loss(real)
            yield steps.Loss(d_loss, self.discriminator.trainable_variables, self.d_optimizer)
        g_loss = -tf.reduce_mean(self.discriminator(self.fakes(real), training=True))
        yield steps.Loss(g_loss, self.generator.trainable_variables, self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}


@example(
    lambda: {"d_optimizer": keras.optimizers.Adam(0.01, 0.5), "g_optimizer": keras.optimizers.Adam(0.01, 0.5)},
    lambda: {"x": numbers(7, 6), "batch_size": 7},
)
def wgan_gp():
    """generative/wgan_gp.py: several steps of a critic, a gradient within a loss."""
    return WganGp()


class SimClr(OneDevice, keras.Model):
    """vision/semisupervised_simclr.py: an augmented contrastive loss and a linear probe."""

    def __init__(self):
        super().__init__()
        self.augmenter = keras.Sequential([keras.Input([6, 6, 3]), layers.RandomFlip("horizontal", seed=1),
                                           layers.RandomTranslation(0.2, 0.2, seed=2)])  # fmt: skip
        self.encoder = keras.Sequential([keras.Input([6, 6, 3]), layers.Conv2D(3, 3, 2, activation="tanh"),
                                         layers.Flatten(), layers.Dense(5, "tanh")])  # fmt: skip
        self.projection_head, self.linear_probe = dense(5, 4), keras.Sequential([keras.Input([5]), layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer):
        super().compile()
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_accuracy, self.probe_accuracy]

    def projections(self, images):
        return [self.projection_head(self.encoder(self.augmenter(images, training=True))) for _ in range(2)]

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        similarities = ops.matmul(first, ops.transpose(second)) / 0.1
        labels = ops.arange(ops.shape(first)[0])
        both = [keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
                for each in (similarities, ops.transpose(similarities))]  # fmt: skip
        return ops.mean(both[0] + both[1]) / 2, labels, similarities

    @property
    def contrastive_weights(self):
        return self.encoder.trainable_weights + self.projection_head.trainable_weights

    def tower_step(self, data):
        images, labels = data
        first, second = yield steps.Join(tuple(self.projections(images)))
        loss, places, similarities = self.contrastive_loss(first, second)
        yield steps.Loss(loss, self.contrastive_weights, self.contrastive_optimizer)
        yield steps.Once(lambda: self.contrastive_accuracy.update_state(places, similarities))
        logits = self.linear_probe(self.encoder(self.augmenter(images, training=True), training=False))
        yield steps.Loss(self.probe_loss(labels, logits), self.linear_probe.trainable_weights, self.probe_optimizer)
        self.probe_accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}


@example(
    lambda: {
        "contrastive_optimizer": keras.optimizers.Adam(0.01),
        "probe_optimizer": keras.optimizers.Adam(0.01),
    },
    lambda: {"x": tf.data.Dataset.from_tensor_slices((np.tanh(numbers(11, 6, 6, 3)) ** 2, classes(11, 3))).batch(7)},
)
def simclr():
    """vision/semisupervised_simclr.py: every example is compared with all others of the batch."""
    return SimClr()


class MomentumContrast(OneDevice, keras.Model):
    """After MoCo v3 (Chen et al. 2021, algorithm 1): views against all keys, of a target that follows the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.target = dense(4, 5, 3), dense(4, 5, 3)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.target.trainable = False

    def losses_of(self, x, keys, places):
        """A mean over the examples of x: each is to find its key, which is at its place among all keys."""
        mine = ops.argmax(ops.equal(x[:, :1], places[None, :]), axis=1)
        logits = ops.matmul(ops.normalize(self.encoder(x - 0.1)), ops.transpose(keys)) / self.temperature
        self.hits.update_state(mine, logits)
        return ops.mean(keras.losses.sparse_categorical_crossentropy(mine, logits, from_logits=True))

    def follow(self):
        for slow, fast in zip(self.target.weights, self.encoder.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)

    def tower_step(self, x):
        keys, places = yield steps.Join((ops.normalize(self.target(x) + 0.1 * self.encoder(x)), x[:, 0]))
        yield steps.Loss(self.losses_of(x, keys, places))
        yield steps.Once(self.follow)
        return {"hits": self.hits.result()}


@example(lambda: {"optimizer": "adam"}, lambda: {"x": numbers(11, 4)}, on_workers=True)
def momentum_contrast():
    """A queue's or a momentum encoder's step: joined rows against the tower's, and an assignment done once."""
    return MomentumContrast()
