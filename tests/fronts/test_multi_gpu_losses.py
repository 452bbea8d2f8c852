"""Losses that layers add, and values that they count or assign, are those of the whole batch in towers, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_twins import CROSS_ENTROPY, assert_same, data, fit_both

import tower_train
from tower_train.errors import ConfigError

layers, ops = keras.layers, keras.ops


class Adds(layers.Layer):
    """Adds function(inputs) to the loss."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


class Measures(layers.Layer):
    """Updates a metric with function(inputs)."""

    def __init__(self, function, name="measured"):
        super().__init__()
        self.function, self.measured = function, keras.metrics.Mean(name=name)

    def call(self, inputs):
        self.measured.update_state(self.function(inputs))
        return inputs


class Counts(layers.Layer):
    """Adds function(inputs) to a variable."""

    def __init__(self, function, dtype):
        super().__init__(dtype=dtype)
        self.function = function

    def build(self, _):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False, name="count")

    def call(self, inputs):
        self.count.assign_add(ops.cast(self.function(inputs), self.count.dtype))
        return inputs


def network(*middle):
    """Builds a network with the layers that `middle` makes between its two dense ones."""
    return lambda: keras.Sequential(
        [keras.Input([4]), layers.Dense(5, "tanh"), *(make() for make in middle), layers.Dense(3)]
    )


def size(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def variance_of(x):
    return ops.mean(ops.var(x, axis=0))


def diversity(x):
    """The entropy of the mean prediction, which is nearly constant at first."""
    mean = ops.mean(ops.softmax(0.3 * x), axis=0)
    return ops.sum(mean * ops.log(mean))


ADDED = {
    "sum with signs": ops.sum,
    "mean over the size": lambda x: ops.mean(x**2) / size(x),
    "vector, which Keras sums": lambda x: ops.sum(x**2, axis=-1),
    "column, which Keras sums": lambda x: ops.sum(x**2, axis=-1, keepdims=True),
    "both": lambda x: [ops.sum(x**2), ops.mean(ops.abs(x))],
    "constant": lambda x: 0 * ops.sum(x) + 7,
    "zero": lambda x: 0 * ops.sum(x),
}
SETTINGS = {"optimizer": "sgd", "loss": CROSS_ENTROPY}


def fit_uneven(gpus, *middle, **kwargs):
    """Trains both twins for 12 steps, of which every third has a batch that towers cannot share out evenly."""
    x, y = data(11, 4)
    validation = {"validation_data": (x, y), "validation_freq": 4}
    return fit_both(network(*middle), gpus, SETTINGS, x, y, batch_size=4, epochs=4, **validation, **kwargs)


@pytest.mark.parametrize(
    ("added", "gpus"),
    [(["sum with signs", "vector, which Keras sums", "column, which Keras sums"], 3),
     (["mean over the size", "constant", "zero"], 3), (["both"], 3), (["both"], 2), (["zero"], 3)],
)  # fmt: skip
def test_an_added_loss_is_that_of_the_whole_batch(float64, added, gpus):
    """Each layer's by itself."""
    assert_same(fit_uneven(gpus, *(lambda name=name: Adds(ADDED[name]) for name in added)), 1e-12)


def test_the_numbers_of_the_issue(float64):
    """A sum over 8 ones times 3 weights is 24, whatever the number of towers."""
    for gpus in (1, 2, 3):
        model = keras.Sequential([keras.Input([3]), Adds(ops.sum)])
        parallel = tower_train.multi_gpu_model(model, gpus=gpus)
        parallel.compile("sgd", lambda y, y_pred: 0 * ops.mean(y_pred))
        assert parallel.evaluate(np.ones([8, 3]), np.ones([8, 3]), verbose=0) == pytest.approx(24)


def test_regularizers_of_activities_and_of_weights(float64):
    def dense(regularizer):
        return layers.Dense(5, activity_regularizer=regularizer, kernel_regularizer="l2", bias_regularizer="l1")

    regularizers = ["l2", lambda y: ops.mean(ops.abs(y)), lambda y: 0.01 * ops.sum(y) * ops.shape(y)[1]]
    assert_same(fit_uneven(3, *(lambda r=r: dense(r) for r in regularizers)), 1e-12)


def test_a_weight_that_only_its_regularizer_changes(float64):
    def build():
        inputs = keras.Input([4])
        outputs = [layers.Dense(3, kernel_regularizer=r, name=n)(inputs) for r, n in ((None, "used"), ("l2", "unused"))]
        return keras.Model(inputs, outputs)

    x, y = data(8, 4)
    assert_same(fit_both(build, 2, {"optimizer": "sgd", "loss": [CROSS_ENTROPY, None]}, x, [y, None]), 1e-12)


def test_a_loss_of_chosen_examples_whose_gradient_is_sparse(float64):
    def of_the_last(y_true, y_pred):
        return CROSS_ENTROPY(y_true[-3:], tf.gather(y_pred, [-3, -2, -1] + tf.shape(y_pred)[0]))

    x, y = data(8, 4)
    assert_same(fit_both(network(), 3, {"optimizer": "sgd", "loss": of_the_last}, x, y, batch_size=8), 1e-12)


@pytest.mark.parametrize(
    "added", [variance_of, diversity, ops.max, lambda x: ops.sqrt(ops.sum(x**2)), lambda x: ops.sum(x[0])]
)
def test_a_loss_that_parts_do_not_determine_is_refused(added):
    parallel = tower_train.multi_gpu_model(network(lambda: Adds(added, name="adding"))(), gpus=2)
    parallel.compile(**SETTINGS)
    before = parallel.get_weights()
    with pytest.raises(ConfigError, match="^multi_gpu_model: the loss that the layer 'adding' .*output of the model"):
        parallel.fit(*data(8, 4), verbose=0)
    for found, expected in zip(parallel.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_with_one_tower_every_loss_is_taken(float64):
    assert_same(fit_uneven(1, lambda: Adds(lambda x: [variance_of(x), diversity(x)])), 1e-12)


def test_after_dropout_sums_are_told_from_means():
    """The trial draws one mask for all of its examples."""
    x, y = data(12, 4)
    for added, scale in ((ops.sum, 12), (ops.mean, 1 / 5)):
        model = network(lambda: layers.Dropout(0.5), lambda added=added: Adds(lambda x: added(x * 0 + 1)))()
        parallel = tower_train.multi_gpu_model(model, gpus=3)
        parallel.compile(**SETTINGS)
        plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, model.predict(x, verbose=0))
        assert parallel.evaluate(x, y, verbose=0) == pytest.approx(float(plain) + 5 * scale, rel=1e-5)
        parallel.fit(x, y, verbose=0)


def test_random_numbers_of_keras_do_not_hide_a_sum():
    class Samples(layers.Layer):
        """Adds the sum of squares of noise, and the noise."""

        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, inputs):
            noise = keras.random.normal(ops.shape(inputs), seed=self.seeds)
            self.add_loss(ops.sum(noise**2))
            return inputs + noise

    x, y = data(3000, 4)
    parallel = tower_train.multi_gpu_model(network(Samples)(), gpus=3)
    parallel.compile("sgd", lambda y, y_pred: 0 * ops.mean(y_pred))
    assert parallel.evaluate(x, y, batch_size=3000, verbose=0) == pytest.approx(3000 * 5, rel=0.05)
    first, second = parallel.predict(np.zeros([4, 4]), batch_size=2, verbose=0).reshape(2, 2, 3)
    assert np.abs(first - second).min() > 1e-4  # each batch gets noise of its own


def test_a_loss_whose_weight_is_0_until_later(float64):
    """The weight may be a Keras variable, which the trial moves; that of a tf.Variable must be seen."""
    weight = keras.Variable(0.0, trainable=False)

    class Annealed(Adds):
        def __init__(self):
            super().__init__(lambda x: self.weight * ops.sum(x**2))
            self.weight = weight

    x, y = data(8, 4)
    parallel = tower_train.multi_gpu_model(network(Annealed)(), gpus=2)
    parallel.compile("sgd", lambda y, y_pred: 0 * ops.mean(y_pred))
    assert parallel.evaluate(x, y, verbose=0) == 0
    weight.assign(1.0)
    hidden = keras.Sequential(parallel.template.layers[:1])(x)
    assert parallel.evaluate(x, y, verbose=0) == pytest.approx(np.sum(np.square(hidden)))

    late = tf.Variable(0.0, dtype=tf.float64)
    parallel = tower_train.multi_gpu_model(network(lambda: Adds(lambda x: late * ops.sum(x**2)))(), gpus=2)
    parallel.compile("sgd", lambda y, y_pred: 0 * ops.mean(y_pred))
    assert parallel.evaluate(x, y, verbose=0) == 0
    late.assign(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gave 0 to add_loss when it was tried.*compile"):
        parallel.evaluate(x, y, verbose=0)
    parallel.compile("sgd", lambda y, y_pred: 0 * ops.mean(y_pred))
    hidden = keras.Sequential(parallel.template.layers[:1])(x)
    assert parallel.evaluate(x, y, verbose=0) == pytest.approx(np.sum(np.square(hidden)))


def test_a_model_that_fails_on_made_up_examples_is_told_why():
    def picky(x):
        tf.debugging.assert_less(x, -2.0, "only below -2")
        return ops.sum(x)

    model = keras.Sequential([keras.Input([4]), layers.Rescaling(1.0), Adds(ops.sum)])
    model.layers[-1].function = picky
    parallel = tower_train.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="This one fails on them: .*only below -2.*Move its losses"):
        parallel.fit(np.full([4, 4], -3.0), np.ones([4, 4]), verbose=0)


def test_a_metric_that_a_layer_updates_is_that_of_the_whole_batch(float64):
    measured = {"sum": ops.sum, "mean": ops.mean, "vector": lambda x: ops.sum(x**2, axis=-1), "constant": lambda x: 3.0}
    trained = fit_uneven(3, *(lambda name=name: Measures(measured[name], name) for name in measured))
    assert_same(trained, 1e-12)
    assert {*measured, *(f"val_{name}" for name in measured)} <= trained[1][1].history.keys()


def test_a_metric_of_the_models_own(float64):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = layers.Dense(3), keras.metrics.Mean(name="norm")

        def call(self, inputs):
            outputs = self.dense(inputs)
            self.norm.update_state(ops.norm(outputs, axis=-1))
            return outputs

    x, y = data(11, 4)
    assert_same(fit_both(Model, 2, SETTINGS, x, y, batch_size=4, epochs=4), 1e-12)


def test_a_metric_that_parts_do_not_determine_is_refused():
    parallel = tower_train.multi_gpu_model(network(lambda: Measures(ops.max))(), gpus=2)
    parallel.compile(**SETTINGS)
    with pytest.raises(ConfigError, match="the metric 'measured', which a layer updates, .*compile\\(metrics"):
        parallel.fit(*data(8, 4), verbose=0)


@pytest.mark.parametrize(("dtype", "other"), [("float64", "int64"), ("int64", "float64")])
def test_counts_of_examples_and_of_steps(float64, dtype, other):
    model = network(lambda: Counts(lambda x: ops.shape(x)[0], dtype), lambda: Counts(lambda x: 1, other))()
    parallel = tower_train.multi_gpu_model(model, gpus=3)
    parallel.compile(**SETTINGS)
    parallel.fit(*data(11, 4), batch_size=4, epochs=4, verbose=0)
    assert [int(layer.count) for layer in model.layers[1:3]] == [44, 12]


def test_other_assignments_are_a_mean_and_said_so(capsys):
    parallel = tower_train.multi_gpu_model(network(lambda: Counts(ops.max, "float32"))(), gpus=2)
    parallel.compile(**SETTINGS)
    parallel.fit(*data(8, 4), verbose=0)
    assert "count gets the mean of what the towers assign" in capsys.readouterr().err
