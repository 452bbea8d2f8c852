"""Programs in which N towers were not one, and others as people write them: they train alike now, or are refused."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings
from tensorflow.python.training import moving_averages

from tower_train import Examples, Workload, errors, keras_network

v1, ops, layers = tf.compat.v1, keras.ops, keras.layers
RNG, LABELS = np.random.default_rng(0), np.arange(96) % 3
POINTS = Examples.from_arrays("points", RNG.normal(LABELS[:, np.newaxis], 1.0, [96, 4]).astype(np.float32), LABELS)
WORDS = RNG.integers(1, 10, [96, 6]) * (np.arange(6) < RNG.integers(1, 7, [96, 1]))  # 0: no word
WORDS = Examples.from_arrays("words", WORDS, LABELS)
MEANS, PROGRAMS = "it goes over the examples of a batch", {}


def program(refusal="", examples=POINTS, **options):
    """Notes a program and what its refusal says; its line there ends with `# here`.

    One that is not refused trains with mirrored variables, which the check compares with one copy on the host, unless
    its options say otherwise.
    """

    def note(function):
        PROGRAMS[function.__name__] = function, refusal, examples, options
        return function

    return note


def weight(name, shape, dtype, initial=None, trainable=True):
    return v1.get_variable(name, shape, dtype, initial, trainable=trainable)


def state(name, shape, dtype, initial=None):
    return weight(name, shape, dtype, initial or v1.zeros_initializer(), trainable=False)


def plain(x, training):
    return tf.nn.relu(x @ weight("a", [x.shape[-1], 8], x.dtype)) @ weight("b", [8, 3], x.dtype)


def words(x):
    """Vectors of words, and what is no padding."""
    return tf.gather(weight("table", [10, 4], tf.float32), x), x > 0


def cross_entropies(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def sequential(*stack, dtype=None, shape=4):
    return keras.Sequential([keras.Input([shape], dtype=dtype), *stack, layers.Dense(3)])


def noise(x):
    return np.random.normal(size=x.shape).astype(x.dtype)


class Codebook(layers.Layer):
    """A VQ-VAE's: it follows the vectors of its codes by means, or by sums, over the batch."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def build(self, shape):
        self.total = self.add_weight((5, shape[-1]), name="total", trainable=False)
        self.size = self.add_weight((5,), "ones", name="size", trainable=False)

    def call(self, x, training=False):
        codes = self.total / (self.size[:, None] + 0.1)
        hot = ops.one_hot(ops.argmin(ops.sum((x[:, None] - codes[None]) ** 2, axis=2), axis=1), 5, dtype=x.dtype)
        if training:
            self.size.assign(0.9 * self.size + 0.1 * self.reduce(hot, axis=0))
            self.total.assign(0.9 * self.total + 0.1 * self.reduce(hot[:, :, None] * x[:, None], axis=0))  # here
        return x + ops.stop_gradient(hot @ codes - x)


class Programs:
    @program("a counter of steps, not of examples")
    def counter_of_examples(x, training):
        seen = state("seen", [], tf.int64).assign_add(x.shape[0])  # here
        return plain(x * tf.minimum(tf.cast(seen, x.dtype) / 30, 1), training)

    @program("Let that be a mean over examples")
    def codebook_by_sums():
        return sequential(layers.Dense(4), Codebook(ops.sum))

    @program(variable_update="cpu")
    def codebook_by_means():
        return sequential(layers.Dense(4), Codebook(ops.mean))

    @program("Use tower_train.layers.random_uniform or random_normal")
    def stateless_normal(x, training):
        return plain(x + tf.random.stateless_normal(x.shape, [1, 2], dtype=x.dtype), training)  # here

    @program("Python computes this constant anew for each tower")
    def random_constant(x, training):
        return plain(x * np.random.normal(size=4), training)  # here

    @program("a Python function gives each tower other values")
    def random_numpy_function(x, training):
        return plain(x + tf.ensure_shape(tf.numpy_function(noise, [x], x.dtype), x.shape), training)  # here

    @program(MEANS)
    def loss_by_sum_of_weights(logits, labels):
        weights = tf.cast(labels + 1, logits.dtype)
        total = tf.reduce_sum(weights * cross_entropies(logits, labels))  # here
        return total / tf.reduce_sum(weights)

    @program("depend on the other examples of the batch")
    def contrastive_loss(logits, labels):
        return tf.reduce_mean(cross_entropies(logits @ tf.transpose(logits), tf.range(logits.shape[0])))  # here

    @program(MEANS)
    def mean_of_the_batch(x, training):
        return plain(x - tf.reduce_mean(x @ weight("c", [4, 4], x.dtype), axis=0), training)  # here

    @program("outside of branches, loops and tf.function")
    def weight_normalisation_by_the_first_batch(x, training):
        begun, scale = state("begun", [], tf.bool), state("scale", [8], x.dtype, v1.ones_initializer())
        hidden = x @ tf.nn.l2_normalize(weight("direction", [4, 8], x.dtype), axis=0)

        def begin():
            with tf.control_dependencies([begun.assign(True), scale.assign(1 / tf.math.reduce_std(hidden, axis=0))]):
                return tf.identity(scale)

        return plain(hidden * tf.cond(begun, lambda: scale, begin), training)  # here

    @program()
    def spectral_normalisation(x, training):
        weights, u = weight("w", [4, 8], x.dtype), state("u", [1, 8], x.dtype, v1.random_normal_initializer())
        v = tf.stop_gradient(tf.nn.l2_normalize(u @ tf.transpose(weights)))
        after = tf.stop_gradient(tf.nn.l2_normalize(v @ weights))
        with tf.control_dependencies([u.assign(after)]):
            return plain(x @ (weights / (v @ weights @ tf.transpose(after))), training)

    @program(examples=WORDS)
    def recurrence_by_scan(x, training):
        a, b = (weight(name, [4, 4], tf.float32) for name in "vw")
        rows = tf.transpose(words(x)[0], [1, 0, 2])
        return plain(tf.scan(lambda h, row: tf.tanh(row @ a + h @ b), rows, tf.zeros_like(rows[0]))[-1], training)

    @program(examples=WORDS)
    def ragged_words(x, training):
        rows = tf.RaggedTensor.from_tensor(x, padding=0)
        return plain(tf.reduce_mean(rows.with_flat_values(words(rows.flat_values)[0]), axis=1), training)

    @program(examples=WORDS)
    def padded_words_in_keras():
        return sequential(layers.Embedding(10, 8, mask_zero=True), layers.SimpleRNN(8), dtype="int64", shape=6)

    @program("a table or a queue keeps it", examples=WORDS)
    def table_that_counts(x, training):
        counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0, name="counts")
        with tf.control_dependencies([counts.insert(x, counts.lookup(x) + 1)]):
            return plain(tf.math.log1p(tf.cast(counts.lookup(x), tf.float32)), training)

    @program("no plain assign, assign_add or assign_sub")
    def centers_by_scatter_sub(x, training):
        centers, codes = state("centers", [3, 4], x.dtype), tf.argmax(x, axis=1) % 3
        with tf.control_dependencies([v1.scatter_sub(centers, codes, 0.1 * (tf.gather(centers, codes) - x))]):  # here
            return plain(x - tf.gather(centers, codes), training)

    @program("Limit them by --clip_gradients")
    def clipped_gradient(x, training):
        clip = tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.01)))  # here
        return plain(clip(x @ weight("w", [4, 4], x.dtype)), training)

    @program("it is the number of examples in a batch")
    def size_of_the_batch(x, training):
        return plain(x / tf.cast(tf.shape(x)[0], x.dtype), training)  # here


@program("Read the variable before (tf.identity of it), and assign a mean over examples")
def fake_quantisation_by_the_batch(x, training):
    """As tf.contrib.quantize does."""
    hidden, largest = x @ weight("a", [4, 8], x.dtype), state("largest", [], x.dtype, v1.ones_initializer())
    limit = moving_averages.assign_moving_average(largest, tf.reduce_max(hidden), 0.9, False)  # here
    return tf.clip_by_value(hidden, -limit, limit) @ weight("b", [8, 3], x.dtype)


@program()
def recomputed_batch_normalisation(x, training):
    a, b = weight("a", [4, 8], x.dtype), weight("b", [8, 3], x.dtype)

    def block(x):
        mean, variance = tf.nn.moments(x @ a, [0], name="statistics")
        return tf.nn.batch_normalization(x @ a, mean, variance, None, None, 1e-3)

    return tf.nn.relu(tf.recompute_grad(block)(x)) @ b


@program(batch_size=1)
def fused_batch_normalisation_of_an_example(x, training):
    hidden = tf.cast(x @ weight("c", [4, 4], x.dtype), tf.float32)[:, tf.newaxis, tf.newaxis]
    normal, *_ = v1.nn.fused_batch_norm(hidden, tf.ones([4]), tf.zeros([4]))
    return plain(tf.cast(normal[:, 0, 0], x.dtype), training)


@program()
def variables_of_one_tensor(x, training):
    initial = tf.random.stateless_normal([4, 3], [1, 2], dtype=x.dtype)
    return x @ v1.get_variable("a", initializer=initial) + tf.nn.relu(x) @ v1.get_variable("b", initializer=initial)


@program("The variable a begins at another value each time that the network is built")
def initial_values_of_numpy(x, training):
    return x @ v1.get_variable("a", initializer=np.random.normal(size=[4, 3]).astype(x.dtype.as_numpy_dtype))


def checked(name):
    """The line of the check, as at the start of a run of two towers; or its refusal."""
    function, refusal, examples, options = PROGRAMS[name]
    names = list(inspect.signature(function).parameters)
    if names == ["logits", "labels"]:
        workload = Workload(name, None, plain, loss=function)
    else:
        workload = Workload(name, None, function if names else keras_network(function))
    options = dict(batch_size=4, variable_update="cpu" if refusal else "mirrored") | options
    return trainings.compared(workload, examples, **options).line


@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_what_one_tower_trains_or_is_refused_by_its_line(name):
    function, refusal, *_ = PROGRAMS[name]
    if not refusal:
        assert checked(name).startswith("towers:   2 equal 1 on this network to ")
        return
    with pytest.raises(errors.GraphError) as refused:
        checked(name)
    assert refusal in str(refused.value)
    if "2 towers differ from 1" in str(refused.value):
        assert str(refused.value).endswith("--allow_differences.") and len(str(refused.value).splitlines()) == 3
    source = Codebook if name == "codebook_by_sums" else function
    lines, first = inspect.getsourcelines(source)
    places = [first + i for i, text in enumerate(lines) if text.endswith("# here\n")]
    assert not places or f"test_programs.py:{places[0]}" in str(refused.value)
