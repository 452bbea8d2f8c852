"""A model's own training step in towers does what a loop with GradientTapes does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import steps

layers, ops = keras.layers, keras.ops
TOWERS = [1, 2, 3]
STEPS = 10


def batches(count=STEPS, examples=7, width=4):
    """The last one has two examples less; no two or three towers share seven or five examples evenly."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=[examples - 2 * (i == count - 1), width]) for i in range(count)]


def dense(*units, name=None):
    return keras.Sequential([keras.Input([units[0]])] + [layers.Dense(n, "tanh") for n in units[1:]], name=name)


def trained(build, gpus, data=None, eagerly=True):
    """Trains the model in towers by Keras' fit; returns the model and the history."""
    keras.utils.set_random_seed(1)
    model = build()
    parallel = tower_train.multi_gpu_model(model, gpus=gpus)
    parallel.compile(run_eagerly=eagerly)
    data = batches() if data is None else data
    signature = keras.tree.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), data[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=signature)
    return model, parallel.fit(dataset, verbose=0).history


def by_hand(build, step, data=None):
    """Trains the model by a function of it and a batch, on one device."""
    keras.utils.set_random_seed(1)
    model = build()
    model.compile()
    data = batches() if data is None else data
    return model, [step(model, keras.tree.map_structure(tf.constant, batch)) for batch in data]


def update(tape, loss, variables, optimizer):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def assert_same_weights(model, expected):
    assert len(model.weights) == len(expected.weights) > 0
    for found, weight in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), weight.numpy(), rtol=0, atol=1e-9, err_msg=weight.path)


class Gan(keras.Model):
    """With dropout in the critic, and random numbers of two kinds."""

    critic_steps, penalty = 1, 0.0

    def __init__(self):
        super().__init__()
        self.generator = dense(3, 5, 4, name="generator")
        hidden = [layers.Dense(6, "tanh"), layers.Dropout(0.3)]
        self.critic = keras.Sequential([keras.Input([4]), *hidden, layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(5)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.critic_optimizer = keras.optimizers.Adam(0.01)
        self.generator_optimizer = keras.optimizers.RMSprop(0.01)

    def critic_loss(self, real):
        count = ops.shape(real)[0]
        fake = self.generator(keras.random.normal([count, 3], seed=self.seeds), training=True)
        both = self.critic(ops.concatenate([fake, real], axis=0), training=True)
        labels = ops.concatenate([ops.ones([count, 1]), ops.zeros([count, 1])], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
        loss = ops.mean(keras.losses.binary_crossentropy(labels, both, from_logits=True))
        if self.penalty:
            between = real + keras.random.uniform([count, 1], seed=self.seeds) * (fake - real)
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.critic(between, training=True)
            norms = tf.norm(tape.gradient(scores, between), axis=1)
            loss += self.penalty * ops.mean(ops.square(norms - 1))
        return loss

    def generator_loss(self, real):
        fake = self.generator(keras.random.normal([ops.shape(real)[0], 3], seed=self.seeds), training=True)
        return -ops.mean(ops.log_sigmoid(-self.critic(fake, training=True)))

    def tower_step(self, real):
        for _ in range(self.critic_steps):
            critic_loss = self.critic_loss(real)
            yield steps.Loss(critic_loss, self.critic.trainable_weights, self.critic_optimizer)
        generator_loss = self.generator_loss(real)
        yield steps.Loss(generator_loss, self.generator.trainable_weights, self.generator_optimizer)
        return {"critic": critic_loss, "generator": generator_loss}

    def step_by_hand(self, real):
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                critic_loss = self.critic_loss(real)
            update(tape, critic_loss, self.critic.trainable_weights, self.critic_optimizer)
        with tf.GradientTape() as tape:
            generator_loss = self.generator_loss(real)
        update(tape, generator_loss, self.generator.trainable_weights, self.generator_optimizer)
        return critic_loss, generator_loss


class WassersteinGan(Gan):
    critic_steps, penalty = 2, 10.0


@pytest.mark.parametrize("kind, towers, eagerly", [(Gan, [2], False), (WassersteinGan, [1, 3], True)])
def test_gans_equal_a_loop_on_one_device(float64, kind, towers, eagerly):
    expected, losses = by_hand(kind, kind.step_by_hand)
    critic, generator = np.average(losses, axis=0, weights=[len(batch) for batch in batches()])
    for gpus in towers:
        model, history = trained(kind, gpus, eagerly=eagerly)
        assert_same_weights(model, expected)
        assert history["critic"] == pytest.approx([critic], abs=1e-9)
        assert history["generator"] == pytest.approx([generator], abs=1e-9)


class Contrastive(keras.Model):
    """NT-Xent (Chen et al. 2020, section 2.1) of two views, with a target that follows the encoder, and a metric."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.target = dense(4, 5), dense(5, 3), dense(4, 5)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.target.trainable = False

    def compile(self, **kwargs):
        super().compile(keras.optimizers.Adam(0.01), **kwargs)

    def views(self, x):
        return [ops.normalize(self.head(self.encoder(x + shift)), axis=1) for shift in (0.1, -0.1)]

    def loss_of_all(self, first, second):
        logits = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        both = [
            keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
            for each in (logits, ops.transpose(logits))
        ]
        return ops.mean(both[0] + both[1]), labels, logits

    def follow(self):
        for slow, fast in zip(self.target.weights, self.encoder.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)

    def tower_step(self, x):
        first, second = yield steps.Join(self.views(x))
        loss, labels, logits = self.loss_of_all(first, second)
        yield steps.Loss(loss + ops.mean(ops.square(self.encoder(x) - self.target(x))))
        yield steps.Once(self.follow)
        yield steps.Once(lambda: self.hits.update_state(labels, logits))
        return {"loss": loss, "hits": self.hits.result()}

    def step_by_hand(self, x):
        with tf.GradientTape() as tape:
            loss, labels, logits = self.loss_of_all(*self.views(x))
            total = loss + ops.mean(ops.square(self.encoder(x) - self.target(x)))
        update(tape, total, self.trainable_weights, self.optimizer)
        self.follow()
        self.hits.update_state(labels, logits)
        return loss


class OwnRowsContrastive(Contrastive):
    """Each tower compares its own examples with those of all towers."""

    def tower_step(self, x):
        own = ops.concatenate(self.views(x), axis=1)
        everyone, places = yield steps.Join([own, x[:, 0]])
        mine = ops.argmax(ops.equal(x[:, :1], places[None, :]), axis=1)
        losses = []
        for these, those in (([0, 3], [3, 6]), ([3, 6], [0, 3])):
            logits = ops.matmul(own[:, slice(*these)], ops.transpose(everyone[:, slice(*those)])) / self.temperature
            losses.append(keras.losses.sparse_categorical_crossentropy(mine, logits, from_logits=True))
        loss = ops.mean(losses[0] + losses[1])
        yield steps.Loss(loss + ops.mean(ops.square(self.encoder(x) - self.target(x))))
        yield steps.Once(self.follow)
        self.hits.update_state(mine, logits)
        return {"loss": loss, "hits": self.hits.result()}


@pytest.mark.parametrize("kind", [Contrastive, OwnRowsContrastive])
def test_contrastive_losses_over_the_global_batch_equal_a_loop_on_one_device(float64, kind):
    expected, losses = by_hand(Contrastive, Contrastive.step_by_hand)
    loss = np.average(losses, weights=[len(batch) for batch in batches()])
    for gpus in TOWERS:
        model, history = trained(kind, gpus)
        assert_same_weights(model, expected)
        assert history["loss"] == pytest.approx([loss], abs=1e-9)
        if kind is Contrastive:
            assert history["hits"] == pytest.approx([expected.hits.result().numpy()], abs=1e-6)
