"""A model's own training step in towers does what a loop with GradientTapes does on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_twins import assert_same, fit_both

import tower_train
from tower_train import steps
from tower_train.errors import UserError

layers, ops = keras.layers, keras.ops


class Tagger(keras.Model):
    """Means over tokens that are not masked, two losses of one forward pass, a normalised kernel, metrics; a penalty
    on a gradient, and clipping."""

    def __init__(self):
        super().__init__()
        self.body = layers.SpectralNormalization(layers.Dense(6, "tanh"))
        self.tags, self.sizes = layers.Dense(3), layers.Dense(1)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def compile(self, **kwargs):
        super().compile(keras.optimizers.SGD(0.1, momentum=0.9), **kwargs)
        self.size_optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))

    def losses_of(self, x, labels, mask):
        hidden = self.body(x, training=True)
        logits = self.tags(hidden)
        of_tags = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        self.accuracy.update_state(labels, logits, sample_weight=mask)
        return of_tags * mask, ops.mean(ops.square(self.sizes(hidden) - x))

    def masked_mean(self, of_tags, mask):
        """Half of it by each of the two ways that docs/migration.md names."""
        divided = ops.mean(of_tags) / steps.mean(ops.mean(mask))
        of_tags, mask = steps.join((of_tags, mask))
        return (ops.sum(of_tags) / ops.sum(mask) + divided) / 2

    def train_step(self, data):
        x, labels, mask = data
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                of_tags, of_sizes = self.losses_of(x, labels, mask)
                loss = self.masked_mean(of_tags, mask)
            loss += 0.1 * sum(ops.sum(slope**2) for slope in inner.gradient(loss, self.tags.trainable_weights))
            scaled = self.size_optimizer.scale_loss(of_sizes)
        weights = [*self.body.trainable_weights, *self.tags.trainable_weights]
        grads, of_size = tape.gradient(loss, weights), tape.gradient(scaled, self.sizes.trainable_weights)
        self.optimizer.apply_gradients(zip(tf.clip_by_global_norm(grads, 0.2)[0], weights, strict=True))
        self.size_optimizer.apply(of_size, self.sizes.trainable_weights)
        self.mean_loss.update_state(of_sizes, sample_weight=tf.shape(x)[0])
        return {"accuracy": self.accuracy.result(), "sizes": self.mean_loss.result()}


def test_masks_metrics_loss_scales_and_fewer_examples_than_towers(float64):
    rng = np.random.default_rng(0)
    mask = (np.arange(5) < rng.integers(1, 6, [9, 1])).astype(float)
    data = (rng.normal(size=[9, 5, 1]) + mask[..., None], rng.integers(0, 3, [9, 5]), mask)
    cuts = tf.data.Dataset.from_tensor_slices([(0, 7), (7, 8), (8, 9)])
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread wakes once a minute, and a closing iterator may wait for that
    batches = cuts.map(lambda cut: tuple(tf.constant(each)[cut[0] : cut[1]] for each in data)).with_options(options)
    assert_same(fit_both(Tagger, 2, {}, batches), 1e-9)


class Guide(keras.Model):
    """The step of Keras' guide "Customizing what happens in fit"."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)  # with the regularizers'
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        return {"squares": ops.mean(ops.square(self(data[0])))}


class OfKeras(keras.Model):
    """Keras' own step, called by the model's: on the parts of a batch."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"twice": 2 * logs["loss"]}


@pytest.mark.parametrize("kind", [Guide, OfKeras])
def test_the_steps_of_keras_and_of_its_guide_are_those_of_one_device(float64, kind):
    def build():
        inputs = keras.Input([4])
        hidden = layers.Dropout(0.3)(layers.Dense(5, "tanh", activity_regularizer="l2")(inputs))
        return kind(inputs, layers.Dense(1, kernel_regularizer="l2")(hidden))

    x = np.random.default_rng(0).normal(size=[8, 4])
    settings = {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]}
    validation = {"validation_data": (x, x[:, :1])} if kind is Guide else {}  # whose test_step is its own
    assert_same(fit_both(build, 2, settings, x, x[:, :1], 5, **validation), 1e-9)


class Penalised(keras.Sequential):
    """A penalty for each weight by its gradient, which all towers have: as many rows as a tower has examples."""

    def train_step(self, data):
        x, y = data
        kernel = self.layers[0].kernel  # [4, 3]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            penalty = inner.gradient(loss, kernel) ** 2
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient([loss, penalty], weights), weights, strict=True))
        return {"mse": loss}


def test_penalties_of_weights_are_added_up_once_and_not_in_each_tower(float64):
    x, y = np.split(np.random.default_rng(0).normal(size=[8, 7]), [4], axis=1)
    build = lambda: Penalised([keras.Input([4]), layers.Dense(3, "tanh")])  # noqa: E731
    assert_same(fit_both(build, 2, {"optimizer": "sgd", "loss": "mse"}, x, y, batch_size=8, epochs=3), 1e-12)


class Decorated(keras.Model):
    """A step in tf.functions, one of which is called twice, that assigns to TensorFlow's variables."""

    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.Input([4]), layers.Dropout(0.3), layers.Dense(4)])
        self.steps, self.center = tf.Variable(0, trainable=False), tf.Variable(tf.zeros([4], tf.float64))

    @tf.function
    def minimize(self, x):
        half = tf.constant(0.5, x.dtype)
        if tf.shape(x)[0] == 0:  # for AutoGraph
            half = tf.constant(0.0, x.dtype)
        with tf.GradientTape() as tape:
            outputs = self.dense(x, training=True) - self.center
            loss = half * tf.reduce_mean(outputs**2)
        weights = self.dense.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.center.assign(0.9 * self.center)
        self.center.assign_add(tf.reduce_mean(outputs, axis=0))
        return loss

    @tf.function(reduce_retracing=True)
    def train_step(self, x):
        self.steps.assign_add(1)
        return {"first": self.minimize(x), "second": self.minimize(x), "steps": self.steps}


def test_tf_functions_are_parts_of_the_step_and_assign_to_variables_once(float64):
    trained = fit_both(Decorated, 2, {"optimizer": "sgd"}, np.random.default_rng(0).normal(size=[7, 4]), batch_size=4)
    assert_same(trained, 1e-12)
    (one, _), (several, _) = trained
    assert one.steps.numpy() == several.steps.numpy() == 2
    np.testing.assert_allclose(several.center, one.center, atol=1e-12)


class Sharpness(keras.Model):
    """Weights that layers and the step change and read before they compute gradients; Keras reports its own loss."""

    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.Input([4]), layers.SpectralNormalization(layers.Dense(4)), Centered()])

    def gradients(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x, training=True) - 1) ** 2)
        return tape.gradient(loss, self.dense.trainable_weights)

    def train_step(self, x):
        weights, grads = self.dense.trainable_weights, self.gradients(x)
        for weight, grad in zip(weights, grads, strict=True):
            weight.assign_add(0.1 * grad)
        self.optimizer.apply_gradients(zip(self.gradients(x), weights, strict=True))
        return {"loss": tf.reduce_mean(x)}


class Centered(layers.Layer):
    def build(self, shape):
        self.center = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return x - self.center


def test_what_a_step_assigns_and_reads_is_that_of_all_towers(float64):
    x = np.random.default_rng(0).normal(size=[7, 4])
    assert_same(fit_both(Sharpness, 3, {"optimizer": "sgd"}, x, batch_size=4), 1e-12)


class Own(keras.Model):
    def __init__(self, step):
        super().__init__()
        self.step, self.dense, self.norm = step, layers.Dense(1), layers.BatchNormalization(momentum=0.9)
        self.dense.build([None, 4])
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.whole = self.add_weight((), "zeros", "int32", trainable=False, name="whole")

    def call(self, x):
        return self.dense(self.norm(x))

    def train_step(self, x):
        return self.step(self, x)

    def minimize(self, loss, tape, weights=None):
        weights = self.trainable_weights if weights is None else weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def own(step, gpus=2):
    parallel = tower_train.multi_gpu_model(Own(step), gpus=gpus)
    parallel.compile("sgd")
    return parallel


def after_an_update(function):
    """A step that updates, and returns function(model, batch, the loss)."""

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = ops.mean(self.dense(x))
        self.minimize(loss, tape, self.dense.trainable_weights)
        return function(self, x, loss)

    return step


def in_a_branch(self, x):
    with tf.GradientTape() as tape:
        loss = ops.mean(self.dense(x))
    weights = self.dense.trainable_weights
    grads = tape.gradient(loss, weights)
    apply = lambda: self.optimizer.apply_gradients(zip(grads, weights, strict=True))  # noqa: E731
    tf.cond(loss > 0, lambda: [apply(), 1][1], lambda: 1)
    return {"loss": loss}


@pytest.mark.parametrize(
    "step, message",
    [
        (lambda self, x: steps.join(ops.mean(x)), "steps.join got a scalar"),
        (in_a_branch, "^an update of SGD is inside of a branch"),
        (after_an_update(lambda model, x, loss: {"rows": x}), r"returns .'rows': .*; give a dict of scalars"),
        (after_an_update(lambda model, x, loss: None), "returns None; give a dict"),
    ],
)
def test_mistakes_are_one_line(step, message):
    with pytest.raises(UserError, match=message) as caught:
        own(step).fit(np.ones([4, 4], "float32"), verbose=0)
    assert "\n" not in str(caught.value)


def drawing(draw):
    def step(self, x):
        with tf.GradientTape() as tape:
            loss = ops.mean(self.dense(x * draw(tf.shape(x))))
        self.minimize(loss, tape, self.dense.trainable_weights)
        return {"loss": loss}

    return step


def test_assignments_outside_of_a_once_are_told(capsys):
    def step(self, x):
        with tf.GradientTape() as tape:
            hidden = keras.random.dropout(self.norm(x, training=True), 0.5, seed=self.seed)
            loss = ops.mean(self.dense(hidden))
        self.minimize(loss, tape)
        self.whole.assign(ops.cast(ops.max(x), "int32"))
        self.slow.assign(0.9 * self.slow + 0.1 * self.dense.kernel)
        return {"count": self.count.assign_add(ops.mean(x))}

    for gpus, lines in ((1, 0), (2, 2)):  # none of batch normalisation, random states and averages of weights
        parallel = own(step, gpus)
        parallel.template.slow = keras.Variable(np.zeros([4, 1], "float32"), trainable=False)
        parallel.template.seed = keras.random.SeedGenerator(0)
        parallel.fit(np.array([[1], [2], [6]]) * np.ones([3, 4], "float32"), shuffle=False, verbose=0)
        assert (told := capsys.readouterr().err).count(" gets ") == lines
    assert (parallel.template.count.numpy(), parallel.template.whole.numpy()) == (pytest.approx(3), 2)
    assert "/count gets the mean of what the towers assign, each for its part of the batch" in told
    assert "/whole gets what the first tower assigns, each for its part of the batch" in told
    assert "In a train_step call steps.once(function)" in told


def test_draws_of_tensorflow_are_by_example_and_the_check_finds_others():
    def kernel(draw, towers, **batching):
        keras.utils.set_random_seed(1)
        parallel = own(drawing(draw), towers)
        batches = tf.data.Dataset.from_tensor_slices(np.ones([7, 4], "float32")).batch(4, **batching)
        parallel.fit(batches, verbose=0, epochs=2)
        return parallel.template.dense.kernel.numpy()

    def by_example(shape):
        wholes = tf.random.uniform(shape, 0, 99, tf.int32) + keras.random.randint(shape, 0, 99, seed=1)
        drawn = tf.random.truncated_normal(shape) + keras.random.truncated_normal(shape, seed=1)
        kept = keras.random.dropout(tf.ones(shape), 0.5, noise_shape=[None, 4], seed=1)
        of_columns = keras.random.dropout(tf.ones(shape), 0.5, noise_shape=(1, 4), seed=1)
        of_all = tf.random.uniform([4]) + tf.random.normal([]) + tf.nn.dropout(tf.random.normal(shape), 0.5)
        return tf.random.uniform(shape, seed=5) * drawn * kept + of_columns * tf.cast(wholes, tf.float32) + of_all

    def of_batch(shape):
        drawn = tf.random.normal([4, 4]) * tf.random.uniform(shape=(4, 1), seed=1)
        return keras.random.normal([4, 4]) + keras.random.uniform([4, 1], seed=1) + drawn

    for draw in (by_example, of_batch):
        one, three = (kernel(draw, towers, drop_remainder=draw is of_batch) for towers in (1, 3))
        np.testing.assert_allclose(one, three, rtol=0, atol=1e-5)
    features = np.ones([16, 4], "float32")
    for draw, data, found in (
        (
            lambda shape: tf.random.normal(shape) + keras.random.normal(shape),
            (features, None),
            "equal 1 on this network",
        ),
        (lambda shape: tf.random.gamma(shape, 1.0), (features,), "random numbers by tower"),
        (lambda shape: keras.random.gamma(shape, 1.0), (features,), "keras.random.gamma is called"),
    ):
        keras.utils.set_random_seed(1)
        try:
            line = own(drawing(draw)).check(*data)
        except UserError as error:
            line = str(error)
        assert found in line


class SemiSupervised(keras.Model):
    """A step on a batch of images without labels and another, smaller one with labels, as keras.io's SimCLR."""

    def __init__(self):
        super().__init__()
        self.noise, self.dense = keras.layers.GaussianNoise(0.5, seed=3), keras.layers.Dense(1)
        self.build([None, 3])

    def build(self, shape):
        self.dense.build(shape)

    def compile(self, **kwargs):
        super().compile(keras.optimizers.SGD(0.1), **kwargs)

    def train_step(self, data):
        unlabeled, (x, y) = data
        weights = self.dense.trainable_weights
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.dense(self.noise(ops.concatenate([unlabeled, x]), training=True))))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            error = ops.square(self.dense(x) - y)
            of_labels = ops.mean(error)
        self.optimizer.apply_gradients(zip(tape.gradient(of_labels, weights), weights, strict=True))
        return {"of all": loss, "of labels": of_labels, "total": ops.sum(error), "parts": {"of all": loss}}


def unequal(labeled, drop_remainder=False):
    rng = np.random.default_rng(0)
    few = (rng.normal(size=[2 * labeled, 3]), rng.normal(size=[2 * labeled, 1]))
    batches = (
        tf.data.Dataset.from_tensor_slices(data).batch(size, drop_remainder)
        for data, size in ((rng.normal(size=[20, 3]), 10), (few, labeled))
    )
    return tf.data.Dataset.zip(tuple(batches))


def test_batches_of_two_sizes_that_are_joined_draw_as_on_one_device(float64, capsys):
    """Trained in batches of known sizes, compared in others."""
    (one, one_history), (template, history) = fit_both(SemiSupervised, 2, {}, unequal(4, drop_remainder=True))
    for expected, weight in zip(one.weights, template.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), atol=1e-12, rtol=0)
    for name in ("of all", "of labels"):
        np.testing.assert_allclose(history.history[name], one_history.history[name], atol=1e-12, rtol=0)
    parallel = tower_train.multi_gpu_model(template, gpus=2)
    parallel.compile()
    assert "2 equal 1 on this network" in parallel.check(unequal(4))
    assert "the step reports total otherwise than on one device" in capsys.readouterr().err


def unlabeled():
    return tf.data.Dataset.from_tensors((np.ones([10, 3]), (np.ones([0, 3]), np.ones([0, 1]))))


@pytest.mark.parametrize(
    "batches", [functools.partial(unequal, 3), functools.partial(unequal, 3, drop_remainder=True), unlabeled]
)
def test_batches_of_two_sizes_of_which_towers_have_other_shares_are_refused(float64, batches):
    parallel = tower_train.multi_gpu_model(SemiSupervised(), gpus=2, check_towers="never")
    parallel.compile()
    with pytest.raises(UserError, match="does not part alike into the towers, so means over rows") as caught:
        parallel.fit(batches(), verbose=0)
    assert "\n" not in str(caught.value)
