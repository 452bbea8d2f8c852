"""The smallest programs with the mechanisms of keras.io's examples: {name: Example}.

A model with a training step of its own has both: `train_step`, as published, which plain Keras runs on one device, and
the `tower_step` made of it. Batch normalisation, which sees a tower's part of a batch, is layer normalisation here.
"""

import dataclasses
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
    """A program.

    Attributes:
      build: returns the model.
      compiled: returns the arguments of its `compile`.
      data: returns the arguments of its `fit`.
      on_workers: whether two workers train it in a test.
    """

    build: Callable[[], keras.Model]
    compiled: Callable[[], dict]
    data: Callable[[], dict[str, Any]]
    on_workers: bool = False


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


def crossentropy():
    return {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


@example(
    lambda: {"loss": "categorical_crossentropy", "optimizer": "adam", "metrics": ["accuracy"]},
    lambda: {"x": numbers(22, 8, 8, 1), "y": np.eye(4)[classes(22, 4)], "validation_split": 0.2},
    on_workers=True,
)
def mnist_convnet():
    """vision/mnist_convnet.py: dropout before a softmax."""
    conv = [layers.Conv2D(3, 3, activation="relu"), layers.MaxPooling2D(2), layers.Flatten()]
    return keras.Sequential([keras.Input([8, 8, 1]), *conv, layers.Dropout(0.5), layers.Dense(4, "softmax")])


@example(
    lambda: {"optimizer": "adam", "loss": "binary_crossentropy"},
    lambda: {"x": np.tanh(numbers(11, 8, 8, 1)) ** 2, "y": np.tanh(numbers(11, 8, 8, 1)) ** 2},
)
def autoencoder():
    """vision/autoencoder.py: a sigmoid for each pixel."""
    inputs = keras.Input([8, 8, 1])
    x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(3, 3, activation="relu", padding="same")(inputs))
    x = layers.Conv2DTranspose(3, 3, strides=2, activation="relu", padding="same")(x)
    return keras.Model(inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))


@example(
    lambda: crossentropy() | {"optimizer": keras.optimizers.Adam(1e-3), "metrics": ["sparse_categorical_accuracy"]},
    lambda: {"x": numbers(22, 6, 1), "y": classes(22, 2), "validation_split": 0.2},
)
def transformer_for_time_series():
    """timeseries/timeseries_classification_transformer.py: attention with dropout."""
    inputs = x = keras.Input([6, 1])
    for _ in range(2):
        attended = layers.MultiHeadAttention(key_dim=4, num_heads=2, dropout=0.25)(x, x)
        res = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.25)(attended)) + x
        x = layers.Dropout(0.25)(layers.Conv1D(filters=4, kernel_size=1, activation="relu")(res))
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(filters=1, kernel_size=1)(x)) + res
    x = layers.Dense(5, "relu")(layers.GlobalAveragePooling1D(data_format="channels_last")(x))
    return keras.Model(inputs, layers.Dense(2, "softmax")(layers.Dropout(0.4)(x)))


@example(
    lambda: {"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["accuracy"]},
    lambda: {"x": classes((11, 5), 9), "y": classes(11, 2), "validation_data": (classes((4, 5), 9), classes(4, 2))},
)
def bidirectional_lstm():
    """nlp/bidirectional_lstm_imdb.py: sequences of any length through an embedding."""
    inputs = keras.Input([None], dtype="int32")
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(layers.Embedding(9, 4)(inputs))
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Bidirectional(layers.LSTM(3))(x)))


@example(
    lambda: {"loss": "categorical_crossentropy", "optimizer": "adam", "metrics": ["accuracy"]},
    lambda: {"x": np.eye(5)[classes((11, 4), 5)], "y": np.eye(5)[classes((11, 3), 5, 1)]},
)
def addition_rnn():
    """nlp/addition_rnn.py: a softmax at each step of a sequence."""
    decoder = [layers.RepeatVector(3), layers.LSTM(4, return_sequences=True), layers.Dense(5, "softmax")]
    return keras.Sequential([keras.Input([4, 5]), layers.LSTM(4), *decoder])


def contrastive(y_true, y_pred):
    """The loss of vision/siamese_contrastive.py."""
    margin_square = ops.square(ops.maximum(1 - y_pred, 0))
    return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * margin_square)


@example(
    lambda: {"loss": contrastive, "optimizer": "RMSprop", "metrics": ["accuracy"]},
    lambda: {"x": [numbers(11, 6, 6, 1), numbers(11, 6, 6, 1, seed=1)], "y": classes([11, 1], 2).astype(float)},
)
def siamese():
    """vision/siamese_contrastive.py: one network for two inputs, a distance, a loss of the program's own."""
    image = keras.Input([6, 6, 1])
    maps = layers.AveragePooling2D(2)(layers.Conv2D(3, 3, activation="tanh")(image))
    network = keras.Model(image, layers.Dense(4, "tanh")(layers.LayerNormalization()(layers.Flatten()(maps))))
    left, right = keras.Input([6, 6, 1]), keras.Input([6, 6, 1])
    squares = layers.Lambda(lambda each: ops.sum(ops.square(each[0] - each[1]), axis=1, keepdims=True))
    distance = layers.Lambda(lambda s: ops.sqrt(ops.maximum(s, keras.config.epsilon())))
    merged = distance(squares([network(left), network(right)]))
    return keras.Model([left, right], layers.Dense(1, "sigmoid")(merged))


@example(
    lambda: crossentropy() | {"optimizer": keras.optimizers.AdamW(1e-3, weight_decay=1e-4)},
    lambda: {
        "x": 255 * np.abs(numbers(11, 6, 6, 3)),
        "y": classes(11, 4),
        "class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1},
    },
)
def vision_transformer():
    """vision/image_classification_with_vision_transformer.py: augmentation in the model, patches, positions."""

    class Positions(layers.Layer):
        def build(self, shape):
            self.embedding = layers.Embedding(shape[1], 8)
            self.embedding.build([shape[1]])

        def call(self, patches):
            return patches + self.embedding(ops.expand_dims(ops.arange(patches.shape[1]), 0))

    inputs = keras.Input([6, 6, 3])
    augmentation = [layers.Normalization(mean=100.0, variance=900.0), layers.Resizing(8, 8),
                    layers.RandomFlip("horizontal", seed=1), layers.RandomContrast(0.2, seed=2)]  # fmt: skip
    x = keras.Sequential(augmentation)(inputs)
    patches = layers.Lambda(lambda images: ops.reshape(ops.image.extract_patches(images, 4), [-1, 4, 48]))(x)
    x = Positions()(layers.Dense(8)(patches))
    normed = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1)(normed, normed), x])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.Dense(6, keras.activations.gelu)(x)))


def dense(*units, name=None):
    return keras.Sequential([keras.Input([units[0]]), *(layers.Dense(n, "tanh") for n in units[1:])], name=name)


def updated(tape, loss, variables, optimizer):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class Dcgan(keras.Model):
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

    def train_step(self, real):
        count = tf.shape(real)[0]
        with tf.GradientTape() as tape:
            d_loss = self.d_loss(real)
        updated(tape, d_loss, self.discriminator.trainable_weights, self.d_optimizer)
        with tf.GradientTape() as tape:
            g_loss = self.g_loss(count)
        updated(tape, g_loss, self.generator.trainable_weights, self.g_optimizer)
        self.d_loss_metric.update_state(d_loss, sample_weight=count)
        self.g_loss_metric.update_state(g_loss, sample_weight=count)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}

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
    on_workers=True,
)
def dcgan():
    """generative/dcgan_overriding_train_step.py: two optimizers, noise, a loss of joined halves."""
    return Dcgan()


class WganGp(keras.Model):
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

    def train_step(self, real):
        for _ in range(3):
            with tf.GradientTape() as tape:
                d_loss = self.d_loss(real)
            updated(tape, d_loss, self.discriminator.trainable_variables, self.d_optimizer)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.fakes(real), training=True))
        updated(tape, g_loss, self.generator.trainable_variables, self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}

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


class Vae(keras.Model):
    """generative/vae.py."""

    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.log_var = dense(8, 6), layers.Dense(2), layers.Dense(2)
        self.decoder = keras.Sequential([keras.Input([2]), layers.Dense(8, "sigmoid")])
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, data):
        hidden = self.encoder(data)
        z_mean, z_log_var = self.mean(hidden), self.log_var(hidden)
        epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seed_generator)
        reconstruction = self.decoder(z_mean + ops.exp(0.5 * z_log_var) * epsilon)
        of_pixels = ops.mean(8 * keras.losses.binary_crossentropy(data, reconstruction))
        kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
        return of_pixels + kl_loss, of_pixels, kl_loss

    def reported(self, losses, data):
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss, sample_weight=tf.shape(data)[0])
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.losses_of(data)
        updated(tape, losses[0], self.trainable_weights, self.optimizer)
        return self.reported(losses, data)

    def tower_step(self, data):
        losses = self.losses_of(data)
        yield steps.Loss(losses[0])
        return self.reported(losses, data)


@example(
    lambda: {"optimizer": keras.optimizers.Adam(0.01)},
    lambda: {"x": np.tanh(numbers(11, 8)) ** 2, "batch_size": 7},
)
def vae():
    """generative/vae.py: sampling in the step, three metrics."""
    return Vae()


class SimClr(keras.Model):
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

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            loss, places, similarities = self.contrastive_loss(*self.projections(images))
        updated(tape, loss, self.contrastive_weights, self.contrastive_optimizer)
        self.contrastive_accuracy.update_state(places, similarities)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(self.augmenter(images, training=True), training=False))
            probe_loss = self.probe_loss(labels, logits)
        updated(tape, probe_loss, self.linear_probe.trainable_weights, self.probe_optimizer)
        self.probe_accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}

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
    on_workers=True,
)
def simclr():
    """vision/semisupervised_simclr.py: every example is compared with all others of the batch."""
    return SimClr()


class MomentumContrast(keras.Model):
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

    def train_step(self, x):
        with tf.GradientTape() as tape:
            keys = ops.normalize(self.target(x) + 0.1 * self.encoder(x))
            loss = self.losses_of(x, keys, x[:, 0])
        updated(tape, loss, self.trainable_weights, self.optimizer)
        self.follow()
        return {"hits": self.hits.result()}

    def tower_step(self, x):
        keys, places = yield steps.Join((ops.normalize(self.target(x) + 0.1 * self.encoder(x)), x[:, 0]))
        yield steps.Loss(self.losses_of(x, keys, places))
        yield steps.Once(self.follow)
        return {"hits": self.hits.result()}


@example(lambda: {"optimizer": "adam"}, lambda: {"x": numbers(11, 4)}, on_workers=True)
def momentum_contrast():
    """A queue's or a momentum encoder's step: joined rows against the tower's, and an assignment done once."""
    return MomentumContrast()


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
    encoded = [layers.Normalization(mean=1.0, variance=2.0)(age), layers.Discretization([-1.0, 0.0, 1.0],
               output_mode="one_hot")(age), layers.CategoryEncoding(4, output_mode="one_hot")(kind),
               layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(word),
               layers.HashedCrossing(6, output_mode="one_hot")((kind, word))]  # fmt: skip
    hidden = layers.Dropout(0.5)(layers.Dense(6, "relu")(layers.concatenate(encoded)))
    return keras.Model({"age": age, "kind": kind, "word": word}, layers.Dense(1, "sigmoid")(hidden))


def sparse_batches():
    x = np.maximum(numbers(11, 6), 0)
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), classes(11, 3))).batch(4)


@example(crossentropy, lambda: {"x": sparse_batches()}, on_workers=True)
def sparse_inputs():
    """A data set of tf.SparseTensor."""
    inputs = keras.Input([6], sparse=True)
    return keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dense(4, "tanh")(inputs)))


def ragged_batches():
    words = tf.ragged.constant([list(range(1, 2 + i % 4)) for i in range(11)], dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((words, classes(11, 3))).batch(4)


@example(crossentropy, lambda: {"x": ragged_batches()})
def ragged_inputs():
    """A data set of tf.RaggedTensor."""

    class Means(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.classes = layers.Embedding(6, 4), layers.Dense(3, "softmax")

        def call(self, words):
            return self.classes(tf.reduce_mean(words.with_flat_values(self.embedding(words.flat_values)), axis=1))

    return Means()
