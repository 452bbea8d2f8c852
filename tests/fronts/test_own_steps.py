"""A model's own training step in towers does what a loop with GradientTapes does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_models import Contrastive, Gan, OwnRowsContrastive, batches, by_hand, update

import tower_train
from tower_train import steps
from tower_train.errors import ConfigError

layers, ops = keras.layers, keras.ops


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


def assert_same_weights(model, expected):
    assert len(model.weights) == len(expected.weights) > 0
    for found, weight in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), weight.numpy(), rtol=0, atol=1e-9, err_msg=weight.path)


class WassersteinGan(Gan):
    """With a gradient penalty (Gulrajani et al. 2017, equation 3) and two steps of the critic."""

    critic_steps, dropout = 2, 0.0

    def critic_loss(self, real):
        fake = self.fakes(real)
        between = real + keras.random.uniform([ops.shape(real)[0], 1], seed=self.seeds) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        norms = tf.norm(tape.gradient(scores, between), axis=1)
        penalty = 10 * ops.mean(ops.square(norms - 1))
        return ops.mean(self.critic(fake)) - ops.mean(self.critic(real)) + penalty

    def generator_loss(self, real):
        return -ops.mean(self.critic(self.fakes(real)))


@pytest.mark.parametrize("kind, towers, eagerly", [(Gan, [2], False), (WassersteinGan, [1, 3], True)])
def test_gans_equal_a_loop_on_one_device(float64, kind, towers, eagerly):
    expected, losses = by_hand(kind, kind.step_by_hand)
    critic, generator = np.average(losses, axis=0, weights=[len(batch) for batch in batches()])
    for gpus in towers:
        model, history = trained(kind, gpus, eagerly=eagerly)
        assert_same_weights(model, expected)
        assert history["critic"] == pytest.approx([critic], abs=1e-9)
        assert history["generator"] == pytest.approx([generator], abs=1e-9)


def test_contrastive_losses_over_the_global_batch_equal_a_loop_on_one_device(float64):
    expected, losses = by_hand(Contrastive, Contrastive.step_by_hand)
    loss = np.average(losses, weights=[len(batch) for batch in batches()])
    for kind, gpus in ((Contrastive, 1), (Contrastive, 2), (OwnRowsContrastive, 3)):
        model, history = trained(kind, gpus)
        assert_same_weights(model, expected)
        assert history["loss"] == pytest.approx([loss], abs=1e-9)
        if kind is Contrastive:
            assert history["hits"] == pytest.approx([expected.hits.result().numpy()], abs=1e-6)


class Tagger(keras.Model):
    """Means over tokens that are not masked, two losses of one forward pass, a normalised kernel, metrics."""

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
        return ops.sum(of_tags * mask) / ops.sum(mask), ops.mean(ops.square(self.sizes(hidden) - x))

    def tower_step(self, data):
        x, labels, mask = data
        of_tags, of_sizes = self.losses_of(x, labels, mask)
        tokens = ops.sum(mask)
        yield [
            steps.Loss(of_tags, [*self.body.trainable_weights, *self.tags.trainable_weights], examples=tokens),
            steps.Loss(of_sizes, self.sizes.trainable_weights, self.size_optimizer),
        ]
        self.mean_loss.update_state(of_sizes, sample_weight=tf.shape(x)[0])
        return {"accuracy": self.accuracy.result(), "sizes": self.mean_loss.result()}

    def step_by_hand(self, data):
        with tf.GradientTape(persistent=True) as tape:
            of_tags, of_sizes = self.losses_of(*data)
            scaled = self.size_optimizer.scale_loss(of_sizes)
        sizes = tape.gradient(scaled, self.sizes.trainable_weights)
        update(tape, of_tags, [*self.body.trainable_weights, *self.tags.trainable_weights], self.optimizer)
        self.size_optimizer.apply_gradients(zip(sizes, self.sizes.trainable_weights, strict=True))
        self.mean_loss.update_state(of_sizes, sample_weight=tf.shape(data[0])[0])


def test_masks_metrics_loss_scales_and_fewer_examples_than_towers(float64):
    rng = np.random.default_rng(0)
    batches = []
    for examples in (7, 5, 2, 1):
        mask = (np.arange(5) < rng.integers(1, 6, [examples, 1])).astype(float)
        batches.append((rng.normal(size=[examples, 5, 1]) + mask[..., None], rng.integers(0, 3, [examples, 5]), mask))
    expected, _ = by_hand(Tagger, lambda model, batch: model.step_by_hand(batch), batches)
    model, history = trained(Tagger, 3, batches)
    assert_same_weights(model, expected)
    assert history["accuracy"] == pytest.approx([expected.accuracy.result().numpy()], abs=1e-6)
    assert history["sizes"] == pytest.approx([expected.mean_loss.result().numpy()], abs=1e-9)


class Guide(keras.Model):
    """The step of Keras' guide "Customizing what happens in fit"."""

    def tower_step(self, data):
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)  # with the regularizers'
        yield steps.Loss(loss)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def test_the_step_of_keras_guide_trains_and_reports_what_keras_does(float64):
    def fitted(kind, make):
        keras.utils.set_random_seed(1)
        inputs = keras.Input([4])
        model = kind(inputs, layers.Dense(1, kernel_regularizer="l2")(layers.Dense(5, "tanh")(inputs)))
        run = make(model)
        run.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
        x = np.random.default_rng(0).normal(size=[15, 4])
        history = run.fit(x, x[:, :1], 5, verbose=0, shuffle=False, validation_data=(x, x[:, :1]))
        return model, history.history

    expected, history = fitted(keras.Model, lambda model: model)
    model, found = fitted(Guide, lambda model: tower_train.multi_gpu_model(model, gpus=3))
    assert_same_weights(model, expected)
    assert found.keys() == history.keys()
    for name, values in history.items():
        assert found[name] == pytest.approx(values, abs=1e-9), name


METRIC = keras.metrics.Mean(name="elsewhere")


class Own(keras.Model):
    def __init__(self, step):
        super().__init__()
        self.step, self.dense, self.norm = step, layers.Dense(1), layers.BatchNormalization(momentum=0.9)
        self.dense.build([None, 4])
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        return self.dense(self.norm(x))

    def tower_step(self, x):
        return self.step(self, x)

    def train_step(self, data):
        raise AssertionError("of one device")

    def test_step(self, data):
        return {"squares": ops.mean(ops.square(self(data)))}


def own(step, gpus=2):
    parallel = tower_train.multi_gpu_model(Own(step), gpus=gpus)
    parallel.compile("sgd", run_eagerly=True)
    return parallel


def test_callbacks_files_evaluation_and_moving_averages(tmp_path):
    def step(self, x):
        loss = ops.mean(self.dense(self.norm(x, training=True)))
        yield steps.Loss(loss)
        return {"loss": loss}

    parallel, path = own(step, gpus=3), tmp_path / "w.weights.h5"
    x = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")
    callbacks = [keras.callbacks.ModelCheckpoint(path, save_weights_only=True)]
    history = parallel.fit(x, batch_size=7, verbose=0, callbacks=callbacks, validation_data=(x, None)).history
    parts = np.array_split(x, 3)
    mean = np.average([part.mean(0) for part in parts], axis=0, weights=[3, 2, 2])
    np.testing.assert_allclose(parallel.template.norm.moving_mean, 0.1 * mean, atol=1e-6)
    outputs = parallel.predict(x, verbose=0)
    assert history["val_squares"] == pytest.approx([np.mean(outputs**2)], abs=1e-6)
    other = Own(step)
    other(x)
    other.load_weights(path)
    np.testing.assert_allclose(other(x), outputs, atol=1e-6)


def not_a_step(self, x):
    return steps.Loss(ops.mean(self.dense(x)))


def no_request(self, x):
    yield ops.mean(self.dense(x))


def no_scalar(self, x):
    yield steps.Loss(self.dense(x)[:, 0])


def another_variable(self, x):
    yield steps.Loss(ops.mean(self.dense(x)), METRIC.variables)


def late_loss(self, x):
    loss = ops.mean(self.dense(x))
    yield steps.Loss(loss)
    yield steps.Loss(2 * loss)


def assignment(self, x):
    yield steps.Loss(ops.mean(self.dense(x)))
    self.count.assign_add(1.0)


def own_update(self, x):
    with tf.GradientTape() as tape:
        loss = ops.mean(self.dense(x))
    update(tape, loss, self.dense.trainable_weights, self.optimizer)
    yield steps.Join(x)


def unknown_metric(self, x):
    yield steps.Loss(ops.mean(self.dense(x)))
    METRIC.update_state(1.0)


def no_logs(self, x):
    yield steps.Loss(ops.mean(self.dense(x)))


def no_log(self, x):
    yield steps.Loss(ops.mean(self.dense(x)))
    return {"rows": x}


def no_cut_draw(self, x):
    yield steps.Loss(ops.mean(self.dense(x) * keras.random.gamma([], 1.0)))


def no_rows(self, x):
    yield steps.Join(ops.mean(self.dense(x)))


@pytest.mark.parametrize(
    "step, message",
    [(not_a_step, "tower_step returns Loss; yield"), (no_request, "tower_step yields SymbolicTensor; yield a steps"),
     (no_scalar, r"a Loss of float32 with shape \(.*\); give a .*tf.reduce_mean"),
     (another_variable, "a Loss for .*, which is no trainable weight"),
     (late_loss, "depends on none of its 2 variables.*compute the loss anew"),
     (assignment, r"Own.tower_step assigns to own.*/count, which every tower would do. Yield steps.Once"),
     (own_update, "calls apply_gradients.*Yield steps.Loss"),
     (unknown_metric, "tower_step assigns to .*a metric must be an attribute"),
     (no_log, r"returns 'rows' with shape \(2, 4\); give a scalar"), (no_cut_draw, "keras.random.gamma.*gpus=1"),
     (no_logs, "returns NoneType; give a dict"), (no_rows, "Join of a scalar")],
)  # fmt: skip
def test_mistakes_are_one_line(step, message):
    with pytest.raises(ConfigError, match=message) as caught:
        own(step).fit(np.ones([4, 4], "float32"), verbose=0)
    assert "\n" not in str(caught.value)


def test_xla_is_refused_and_other_numbers_in_each_tower_are_told(capsys):
    def step(self, x):
        loss = ops.mean(self.dense(x + tf.random.normal(tf.shape(x))))
        yield steps.Loss(loss)
        return {"loss": loss}

    parallel = own(step)
    with pytest.raises(ConfigError, match="jit_compile=True: XLA"):
        parallel.compile("sgd", jit_compile=True)
    parallel.fit(np.ones([4, 4], "float32"), verbose=0)
    assert "Own.tower_step draws with RandomStandardNormal (" in capsys.readouterr().err
