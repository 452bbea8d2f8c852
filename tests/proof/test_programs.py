"""Programs in which N towers were not one, and others as people write them: they train alike now, or are refused.

`python tests/proof/test_programs.py` prints a row for each. At a commit before the check, with `tests` on the path, it
prints by how much two towers differ from one there.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings
from tensorflow.python.training import moving_averages

from tower_train import Examples, Workload, keras_network

v1, ops = tf.compat.v1, keras.ops
RNG = np.random.default_rng(0)
LABELS = np.arange(96) % 3
POINTS = Examples.from_arrays("points", RNG.normal(LABELS[:, np.newaxis], 1.0, [96, 4]).astype(np.float32), LABELS)
WORDS = RNG.integers(1, 10, [96, 6]) * (np.arange(6) < RNG.integers(1, 7, [96, 1]))  # 0: no word
WORDS = Examples.from_arrays("words", WORDS, LABELS)
PROGRAMS, MODES = {}, {"cpu": {}, "mirrored": dict(variable_update="mirrored")}


def program(title, refusal="", examples=POINTS, **options):
    """Notes a program: what it is, and what its refusal says; its line there ends with `# here`."""

    def note(function):
        PROGRAMS[function.__name__] = title, function, refusal, examples, options
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


@program("sparse gradients, clipped", examples=WORDS, clip_gradients=0.1)
def clipped(x, training):
    return plain(tf.reduce_mean(words(x)[0], axis=1), training)


@program("a counter of steps that the network uses")
def counter(x, training):
    steps = state("steps", [], tf.int64).assign_add(1)
    return plain(x * tf.minimum(tf.cast(steps, x.dtype) / 3, 1), training)


@program("a counter of examples", "a counter of steps, not of examples")
def counter_of_examples(x, training):
    seen = state("seen", [], tf.int64).assign_add(x.shape[0])  # here
    return plain(x * tf.minimum(tf.cast(seen, x.dtype) / 30, 1), training)


@program("a running mean that the network uses")
def running_mean(x, training):
    mean = state("mean", [4], x.dtype)
    before = mean.read_value()
    mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, axis=0))
    return plain(x - before, training)


class Codebook(keras.layers.Layer):
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


@program("VQ-VAE's codebook, Keras, by sums over the batch", "Let that be a mean over examples")
def codebook_of_sums():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(4), Codebook(ops.sum), keras.layers.Dense(3)])


@program("the same by means")
def codebook_of_means():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(4), Codebook(ops.mean), keras.layers.Dense(3)])


@program("batch normalisation by UPDATE_OPS")
def update_ops(x, training):
    hidden = x @ weight("a", [4, 8], x.dtype)
    mean, variance = tf.nn.moments(hidden, [0])
    for name, value in (("moving_mean", mean), ("moving_variance", variance)):
        update = moving_averages.assign_moving_average(state(name, [8], x.dtype), value, 0.9, False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3) @ weight("b", [8, 3], x.dtype)


@program("a loss in REGULARIZATION_LOSSES")
def regularized(x, training):
    weights = weight("a", [4, 3], x.dtype)
    v1.add_to_collection(v1.GraphKeys.REGULARIZATION_LOSSES, 0.1 * tf.nn.l2_loss(weights))
    return x @ weights


@program("a loss in LOSSES that `loss` leaves out", "is in tf.compat.v1.GraphKeys.LOSSES, but not part of the loss")
def forgotten(x, training):
    v1.losses.add_loss(0.1 * tf.reduce_mean(x**2))  # here
    return plain(x, training)


@program("tf.random.stateless_normal for the batch", "Use tower_train.layers.random_uniform or random_normal")
def stateless(x, training):
    return plain(x + tf.random.stateless_normal(x.shape, [1, 2], dtype=x.dtype), training)  # here


@program("np.random in inference", "Python computes this constant anew for each tower")
def random_constant(x, training):
    return plain(x * np.random.normal(size=4), training)  # here


@program("np.random in numpy_function", "a Python function gives each tower other values")
def random_function(x, training):
    def noise(x):
        return np.random.normal(size=x.shape).astype(x.dtype)

    return plain(x + tf.ensure_shape(tf.numpy_function(noise, [x], x.dtype), x.shape), training)  # here


@program("a loss that is a sum", "the loss is a sum over the batch")
def summed(logits, labels):
    return tf.reduce_sum(cross_entropies(logits, labels))  # here


@program("weights that are divided by their sum", "it goes over the examples of a batch")
def weighted(logits, labels):
    weights = tf.cast(labels + 1, logits.dtype)
    total = tf.reduce_sum(weights * cross_entropies(logits, labels))  # here
    return total / tf.reduce_sum(weights)


@program("a contrastive loss over the batch", "depend on the other examples of the batch")
def contrastive(logits, labels):
    return tf.reduce_mean(cross_entropies(logits @ tf.transpose(logits), tf.range(logits.shape[0])))  # here


@program("the batch's mean within the network", "it goes over the examples of a batch")
def centered(x, training):
    return plain(x - tf.reduce_mean(x @ weight("c", [4, 4], x.dtype), axis=0), training)  # here


@program("words in a Keras network, --dtype=bfloat16", examples=WORDS, dtype="bfloat16")
def words_in_bfloat16():
    layers = [keras.Input([6], dtype="int64"), keras.layers.Embedding(10, 8), keras.layers.GlobalAveragePooling1D()]
    assert layers[1].compute_dtype in ("bfloat16", "float64"), layers[1].compute_dtype  # float64: of the check
    return keras.Sequential([*layers, keras.layers.Dense(3)])


class Gamma(keras.layers.Layer):
    def build(self, shape):
        self.seed = keras.random.SeedGenerator(0)

    def call(self, x):
        return x * keras.random.gamma(ops.shape(x), 1.0, seed=self.seed)  # here


@program("keras.random.gamma", "it draws numbers for the rows of a batch")
def gamma():
    return keras.Sequential([keras.Input([4]), Gamma(), keras.layers.Dense(3)])


@program("two layers of one name", "a exists already: a second layer would share its weights")
def same_name(x, training):
    for _ in range(2):
        x = tf.nn.relu(x @ weight("a", [4, 4], x.dtype))
    return x[:, :3]


@program("weight normalisation that begins by the first batch", "outside of branches, loops and tf.function")
def weight_norm(x, training):
    begun, scale = state("begun", [], tf.bool), state("scale", [8], x.dtype, v1.ones_initializer())
    hidden = x @ tf.nn.l2_normalize(weight("direction", [4, 8], x.dtype), axis=0)

    def begin():
        with tf.control_dependencies([begun.assign(True), scale.assign(1 / tf.math.reduce_std(hidden, axis=0))]):
            return tf.identity(scale)

    return plain(hidden * tf.cond(begun, lambda: scale, begin), training)  # here


@program("spectral normalisation")
def spectral_norm(x, training):
    weights, u = weight("w", [4, 8], x.dtype), state("u", [1, 8], x.dtype, v1.random_normal_initializer())
    v = tf.stop_gradient(tf.nn.l2_normalize(u @ tf.transpose(weights)))
    after = tf.stop_gradient(tf.nn.l2_normalize(v @ weights))
    with tf.control_dependencies([u.assign(after)]):
        return plain(x @ (weights / (v @ weights @ tf.transpose(after))), training)


@program("MoCo's queue of the last batches", "Let that be a mean over examples")
def queue_in_a_variable(x, training):
    queue, keys = state("queue", [16, 8], x.dtype, v1.random_normal_initializer()), x @ weight("k", [4, 8], x.dtype)
    scores = keys @ tf.transpose(queue.read_value())
    queue.assign(tf.concat([queue[x.shape[0] :], tf.stop_gradient(keys)], axis=0))  # here
    return plain(tf.nn.softmax(scores), training)


@program("a teacher that follows the weights, by tf.train.ExponentialMovingAverage")
def teacher(x, training):
    outputs, average = plain(x, training), tf.train.ExponentialMovingAverage(0.9, name="teacher")
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.apply(v1.trainable_variables()))
    a, b = map(average.average, v1.trainable_variables())
    return outputs + 0.1 * tf.stop_gradient(tf.cast(tf.nn.relu(tf.cast(x, a.dtype) @ a) @ b, x.dtype))


@program("a gradient penalty, for each example")
def gradient_penalty(x, training):
    x = tf.identity(x)
    outputs = plain(tf.tanh(x @ weight("w", [4, 4], x.dtype)), training)
    norms = tf.norm(tf.gradients(outputs[:, 0], x)[0], axis=1)
    v1.losses.add_loss(tf.reduce_mean((norms - 1) ** 2), v1.GraphKeys.REGULARIZATION_LOSSES)
    return outputs


@program("the mean over all words of the batch, by a mask", "it goes over the examples of a batch", examples=WORDS)
def masked(x, training):
    vectors, mask = words(x)
    count = tf.reduce_sum(tf.cast(mask, vectors.dtype))
    v1.losses.add_loss(tf.reduce_sum(vectors**2) / count, v1.GraphKeys.REGULARIZATION_LOSSES)  # here
    return plain(tf.reduce_mean(vectors, axis=1), training)


@program("ragged words, a mean for each example", examples=WORDS)
def ragged(x, training):
    rows = tf.RaggedTensor.from_tensor(x, padding=0)
    return plain(tf.reduce_mean(rows.with_flat_values(words(rows.flat_values)[0]), axis=1), training)


@program("padded words, Keras' masks and LSTM", examples=WORDS)
def recurrent():
    layers = [keras.Input([6], dtype="int64"), keras.layers.Embedding(10, 8, mask_zero=True), keras.layers.LSTM(8)]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


@program("a table that counts words", "a table or a queue keeps it", examples=WORDS)
def table(x, training):
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0, name="counts")
    with tf.control_dependencies([counts.insert(x, counts.lookup(x) + 1)]):
        return plain(tf.math.log1p(tf.cast(counts.lookup(x), tf.float32)), training)


@program("centers that scatter_sub follows", "no plain assign, assign_add or assign_sub")
def center_loss(x, training):
    centers, codes = state("centers", [3, 4], x.dtype), tf.argmax(x, axis=1) % 3
    with tf.control_dependencies([v1.scatter_sub(centers, codes, 0.1 * (tf.gather(centers, codes) - x))]):  # here
        return plain(x - tf.gather(centers, codes), training)


@program("a layer that clips the gradient", "Limit them by --clip_gradients")
def clipped_gradient(x, training):
    clip = tf.custom_gradient(lambda x: (tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.01)))  # here
    return plain(clip(x @ weight("w", [4, 4], x.dtype)), training)


@program("the number of examples in the network", "it is the number of examples in a batch")
def batch_size(x, training):
    return plain(x / tf.cast(tf.shape(x)[0], x.dtype), training)  # here


@program("tf.recompute_grad")
def recomputed(x, training):
    weights = weight("w", [4, 4], x.dtype)
    return plain(tf.recompute_grad(lambda x: tf.tanh(x @ weights))(x), training)


@program("a complex variable")
def complex_numbers(x, training):
    weights = weight("w", [4, 4], tf.complex64, v1.ones_initializer())
    return plain(tf.cast(tf.abs(tf.cast(x, tf.complex64) @ weights), x.dtype), training)


def workload(name):
    """A program as a workload."""
    title, function, _, examples, _ = PROGRAMS[name]
    names = list(inspect.signature(function).parameters)
    if names == ["logits", "labels"]:
        return Workload(name, lambda _: examples, plain, loss=function)
    return Workload(name, lambda _: examples, function if names else keras_network(function))


def checked(name, **more):
    """The line of the check, as at the start of a run of two towers; or its refusal."""
    from tower_train.graph import devices, training
    from tower_train.proof import towers

    options = dict(num_gpus=2, device="cpu", batch_size=4, learning_rate=0.01, optimizer="momentum",
                   summary_every_steps=0) | more | PROGRAMS[name][4]  # fmt: skip
    config, examples = (made := workload(name)).config(**options), PROGRAMS[name][3]
    graph = training.training_graph(made, examples, config, devices.place(config))
    return towers.compare_towers(made, examples, config, graph).line


@pytest.mark.usefixtures("own_tracebacks")
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name, (_, _, refusal, *_) in PROGRAMS.items() for mode in MODES if mode == "cpu" or not refusal],
)
def test_trains_what_one_tower_trains_or_is_refused_by_its_line(name, mode):
    from tower_train import errors

    _, function, refusal, _, _ = PROGRAMS[name]
    if not refusal:
        assert checked(name, **MODES[mode]).startswith("towers:   2 equal 1 on this network to ")
        return
    with pytest.raises(errors.GraphError) as refused:
        checked(name, **MODES[mode])
    assert refusal in str(refused.value)
    if "2 towers differ from 1" in str(refused.value):
        assert str(refused.value).endswith("--allow_differences.") and len(str(refused.value).splitlines()) == 3
    source = {"codebook_of_sums": Codebook, "gamma": Gamma}.get(name, function)
    lines, first = inspect.getsourcelines(source)
    places = [first + i for i, text in enumerate(lines) if text.endswith("# here\n")]
    assert not places or f"test_programs.py:{places[0]}" in str(refused.value)


def difference(name):
    """By how much two towers differ from one in their losses and variables after three steps; or an error."""
    examples, sides = PROGRAMS[name][3], []
    options = dict(learning_rate=0.01, optimizer="momentum") | PROGRAMS[name][4]
    try:
        for towers in (1, 2):
            losses, values = trainings.train(
                workload(name), examples, 3, num_gpus=towers, batch_size=8 // towers, **options
            )
            sides.append({"loss": np.array(losses), **values})
    except Exception as error:  # of whatever kind
        return str(error).splitlines()[0]
    floats = [(value, sides[1][key]) for key, value in sides[0].items() if value.dtype.kind in "fi"]
    return f"{max(np.abs(a - b).max(initial=0) / (np.abs(a).max(initial=0) or 1) for a, b in floats):.0e}"


def main():
    """Prints a row for each program."""
    try:
        from tower_train.proof import towers  # noqa: F401

        show = checked
    except ImportError:
        show = difference
    for name, (title, *_) in PROGRAMS.items():
        try:
            line = show(name)
        except Exception as error:
            line = " ".join(str(error).splitlines())
        print(f"{title}: {line}", flush=True)


if __name__ == "__main__":
    main()
