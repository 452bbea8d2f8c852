"""Models with steps of their own, the same steps by hand on one device, and batches for them."""

import keras
import numpy as np
import tensorflow as tf

from tower_train import steps

layers, ops = keras.layers, keras.ops
STEPS = 10


def batches(count=STEPS, examples=7, width=4):
    """The last one has two examples less; no two or three towers share seven or five examples evenly."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=[examples - 2 * (i == count - 1), width]) for i in range(count)]


def dense(*units, name=None):
    return keras.Sequential([keras.Input([units[0]])] + [layers.Dense(n, "tanh") for n in units[1:]], name=name)


def by_hand(build, step, data=None):
    """Trains the model by a function of it and a batch, on one device."""
    keras.utils.set_random_seed(1)
    model = build()
    model.compile()
    data = batches() if data is None else data
    return model, [step(model, keras.tree.map_structure(tf.constant, batch)) for batch in data]


def update(tape, loss, variables, optimizer):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class Gan(keras.Model):
    """With dropout in the critic, and random numbers of two kinds."""

    critic_steps, dropout = 1, 0.3

    def __init__(self):
        super().__init__()
        self.generator = dense(3, 5, 4)
        hidden = [layers.Dense(6, "tanh"), layers.Dropout(self.dropout, seed=3)]
        self.critic = keras.Sequential([keras.Input([4]), *hidden, layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(5)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.critic_optimizer = keras.optimizers.Adam(0.01)
        self.generator_optimizer = keras.optimizers.RMSprop(0.01)

    def fakes(self, real):
        return self.generator(keras.random.normal([ops.shape(real)[0], 3], seed=self.seeds), training=True)

    def critic_loss(self, real):
        both = self.critic(ops.concatenate([self.fakes(real), real], axis=0), training=True)
        ones = ops.ones_like(real[:, :1])
        labels = ops.concatenate([ones, 0 * ones], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
        return ops.mean(keras.losses.binary_crossentropy(labels, both, from_logits=True))

    def generator_loss(self, real):
        return -ops.mean(ops.log_sigmoid(-self.critic(self.fakes(real), training=True)))

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
