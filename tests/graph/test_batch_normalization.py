"""Batch normalisation against numpy: its outputs, its moving statistics, its gradient, and N towers of it."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train import layers, mean_squared_error, normalization
from tower_train.graph import context
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
MOMENTUM, EPSILON = 0.8, 1e-3
TRAIN = dict(learning_rate=0.1, dtype="float64", ema=0.9)


def normalize(x, gamma, beta):
    axes = tuple(range(x.ndim - 1))
    return gamma * (x - x.mean(axes)) / np.sqrt(x.var(axes) + EPSILON) + beta


def run(x, training, assign, **options):
    """(outputs, {statistic: value}) of the layer on x; assign: (variable's name, value) of all variables."""
    with tf.Graph().as_default(), v1.Session() as session:
        with context.Context().enter_tower(0) as tower:
            outputs = layers.batch_normalization(tf.constant(x), training, MOMENTUM, EPSILON, name="norm", **options)
        session.run(v1.global_variables_initializer())
        variables = {variable.op.name.removeprefix("norm/"): variable for variable in v1.global_variables()}
        assert variables.keys() == dict(assign).keys()
        for name, value in assign:
            variables[name].load(value, session)
        noted = {s.moving.op.name: s.value for s in tower.statistics}
        return session.run((outputs, noted))


GAMMA, BETA = np.array([1.5, -0.5, 2.0]), np.array([0.25, 1.0, -3.0])


@pytest.mark.parametrize(
    ("dtype", "shape", "training", "scale"),
    [
        (np.float64, (6, 3), True, True),
        (np.float32, (4, 5, 2, 3), True, True),
        (np.float64, (4, 5, 2, 3), True, False),
        (np.float32, (4, 5, 3), False, True),
        (np.float64, (1, 1, 1, 3), False, 0.75),
    ],
)
def test_outputs_and_noted_statistics_are_those_of_numpy(dtype, shape, training, scale):
    """Of the batch in training, the moving ones in evaluation, which notes none. Without a scale there is no gamma."""
    tolerance = 1e-12 if dtype is np.float64 else 2e-5
    x, axes = np.random.default_rng(0).normal(2, 3, shape).astype(dtype), tuple(range(len(shape) - 1))
    mean, variance = np.arange(3.0), np.array([1.0, 4.0, 0.5])
    values = [("beta", BETA), ("moving_mean", mean), ("moving_variance", variance)]
    values += [("gamma", GAMMA)] if scale is True else []
    outputs, noted = run(x, training, [(name, value.astype(dtype)) for name, value in values], scale=scale)
    wide, gamma = x.astype(np.float64), GAMMA if scale is True else 1
    expected = normalize(wide, gamma, BETA)
    if training:
        np.testing.assert_allclose(noted.pop("norm/moving_mean"), wide.mean(axes), rtol=tolerance)
        np.testing.assert_allclose(
            noted.pop("norm/moving_variance"), wide.var(axes), rtol=10 * tolerance, atol=tolerance
        )
    else:
        expected = gamma * (wide - mean) / np.sqrt(variance + EPSILON) + BETA
    np.testing.assert_allclose(outputs, (1 if scale is True else scale or 1) * expected, atol=20 * tolerance)
    assert not noted and outputs.dtype == dtype


def test_an_epsilon_below_that_of_fused_operations_is_theirs_in_evaluations_too():
    """Statistics of 1e-6, to which 1e-7 and the least of cuDNN, 1.001e-5, add very different things."""
    x = np.random.default_rng(0).normal(0, 1e-3, [8, 5, 5, 3]).astype(np.float32)
    mean, variance = x.mean((0, 1, 2), dtype=np.float64), x.var((0, 1, 2), dtype=np.float64)
    with tf.Graph().as_default(), v1.Session() as session, context.Context().enter_tower(0):
        ends = [
            normalization.normalize(
                tf.constant(x),
                training,
                tf.ones(3),
                tf.zeros(3),
                [mean.astype(np.float32), variance.astype(np.float32)],
                0.9,
                1e-7,
            )
            for training in (True, False)
        ]
        for outputs in session.run(ends):
            np.testing.assert_allclose(outputs, (x - mean) / np.sqrt(variance + 1.001e-5), atol=1e-4)


@pytest.mark.parametrize(("scale", "dtype"), [(False, tf.bfloat16), (True, tf.float16)])
def test_variables_and_statistics_are_never_below_float32(scale, dtype):
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = tf.cast(tf.constant(np.random.default_rng(0).normal(2, 3, [8, 4, 4, 3])), dtype)
        with context.Context().enter_tower(0) as tower:
            outputs = layers.batch_normalization(x, True, epsilon=EPSILON, scale=scale)
        assert "FusedBatchNormV3" in {op.type for op in graph.get_operations()}
        assert outputs.dtype == dtype and {v.dtype.base_dtype for v in v1.global_variables()} == {tf.float32}
        session.run(v1.global_variables_initializer())
        fetches = tf.cast(x, tf.float64), tf.cast(outputs, tf.float64), [each.value for each in tower.statistics]
        wide, found, (mean, variance) = session.run(fetches)
    np.testing.assert_allclose(found, normalize(wide, 1, 0), atol=0.03)
    np.testing.assert_allclose(mean, wide.mean((0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(variance, wide.var((0, 1, 2)), rtol=1e-4)


def test_gradients_that_float16_could_not_sum_are_finite():
    """The upstream gradient of each of 4,096 rows is 32, of all 131,072; the greatest number is 65,504."""
    with tf.Graph().as_default(), v1.Session() as session:
        outputs = layers.batch_normalization(tf.cast(tf.random.normal([4096, 2], seed=1), tf.float16), True)
        beta = next(v for v in v1.trainable_variables() if v.op.name.endswith("beta"))
        [gradient] = tf.gradients(outputs, beta, tf.fill([4096, 2], tf.constant(32, tf.float16)))
        session.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(gradient), [131_072, 131_072])


def make(layer=layers.batch_normalization):
    """A workload: squared error of a normalised linear function; 48 examples of 4 features."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(1, 2, [48, 4]), rng.normal(size=48)

    def network(features, training):
        kernel = v1.get_variable("kernel", [4, 3], features.dtype, v1.constant_initializer(KERNEL))
        maps = tf.nn.relu(layer(features @ kernel, training, MOMENTUM, EPSILON, name="first"))
        return tf.reduce_sum(layer(maps, training, MOMENTUM, EPSILON, name="second") * [1.0, 2.0, 3.0], axis=1)

    return Workload("norm", None, network, mean_squared_error), Examples.from_arrays("norm", features, labels)


KERNEL = np.random.default_rng(1).normal(size=[4, 3])


@pytest.mark.parametrize(("over", "update"), [("tower", "mirrored"), ("global", "cpu")])
def test_moving_statistics_follow_the_mean_over_towers_and_batches(over, update):
    seen, batches = [], 2

    def spying(inputs, training, *args, name, **kwargs):
        if name == "first":
            seen.append(inputs)
        return layers.batch_normalization(inputs, training, *args, name=name, **kwargs)

    workload, examples = make(spying)
    options = TRAIN | dict(learning_rate=1e-30, num_gpus=2, batch_size=2, accumulate_steps=batches)
    options |= dict(variable_update=update, batch_norm=over)
    with trainings.opened(workload, examples, **options) as (built, session):
        mean, variance = np.zeros(3), np.ones(3)
        for _ in range(2):
            normalized = np.stack(session.run((seen, built.report))[0])
            per_tower = normalized.reshape(batches, -1, 3) if over == "global" else normalized
            mean = MOMENTUM * mean + (1 - MOMENTUM) * np.mean([batch.mean(0) for batch in per_tower], axis=0)
            variance = MOMENTUM * variance + (1 - MOMENTUM) * np.mean([batch.var(0) for batch in per_tower], axis=0)
        found = session.run({v.op.name: v for v in built.saved.variables})
    np.testing.assert_allclose(found["first/moving_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(found["first/moving_variance"], variance, rtol=1e-12)


def decay(weights):
    return 0.25 * tf.reduce_sum(weights**2)


def decayed(*args, **kwargs):
    return layers.batch_normalization(*args, **kwargs, regularizer=decay)


def decayed_by_scope(*args, **kwargs):
    with v1.variable_scope(v1.get_variable_scope(), regularizer=decay):
        return layers.batch_normalization(*args, **kwargs)


@pytest.mark.parametrize(("layer", "update"), [(decayed, "mirrored"), (decayed_by_scope, "cpu")])
def test_loss_and_gradient_are_those_of_one_big_batch_in_numpy(layer, update):
    """By central differences of the loss, with the decay of gamma and beta alone, against the step of two towers."""
    workload, examples = make(layer)
    noted, seen = trainings.noting(workload)
    options = TRAIN | dict(num_gpus=2, batch_size=4, ema=0.0)
    with trainings.opened(noted, examples, variable_update=update, **options) as (built, session):
        variables = {v.op.name: v for v in built.saved.variables if v.trainable}
        start = session.run(variables)
        values, report = session.run((seen, built.report))
        ended = session.run(variables)
    x, y = np.concatenate(values[::2]), np.concatenate(values[1::2])

    def loss(weights):
        maps = np.maximum(normalize(x @ weights["kernel"], weights["first/gamma"], weights["first/beta"]), 0)
        outputs = normalize(maps, weights["second/gamma"], weights["second/beta"]) @ [1.0, 2.0, 3.0]
        return np.mean((outputs - y) ** 2) + 0.25 * sum(np.sum(w**2) for n, w in weights.items() if n != "kernel")

    assert start.keys() == {"kernel", "first/gamma", "first/beta", "second/gamma", "second/beta"}
    assert report.loss == pytest.approx(loss(start), rel=1e-12)
    for name, value in start.items():
        expected = np.zeros_like(value)
        for index in np.ndindex(*value.shape):
            delta = np.zeros_like(value)
            delta[index] = 1e-6
            expected[index] = loss(start | {name: value + delta}) - loss(start | {name: value - delta})
        found = (value - ended[name]) / TRAIN["learning_rate"]
        np.testing.assert_allclose(found, expected / 2e-6, atol=1e-7, err_msg=name)


def by_moments(features, training):
    """Over the batch alone, and over all positions of it with the time first, which is as long as a batch is large."""
    x = tf.transpose(tf.reshape(features @ v1.get_variable("k", [4, 24], features.dtype), [-1, 6, 4]), [1, 0, 2])
    mean, variance = v1.nn.moments(x, 1, keep_dims=True)
    x = (x - mean) * tf.math.rsqrt(variance + EPSILON)
    mean, variance = tf.nn.moments(x + 0.1 * x**2, [0, 1])
    x = x * tf.math.rsqrt(variance + EPSILON) - mean
    mean, _ = tf.nn.moments(x, 0)  # of each example, over its time
    return tf.reduce_sum(mean * [1.0, 2.0, 3.0, 4.0], 1)


def fused(features, training):
    """In float32, as the operation needs; its variance is divided by n - 1 of all towers' n."""
    x = tf.cast(tf.reshape(features @ v1.get_variable("k", [4, 24], features.dtype), [-1, 2, 3, 4]), tf.float32)
    moving = [v1.get_variable(name, [4], tf.float32, trainable=False) for name in ("mean", "variance")]
    x, *found = v1.nn.fused_batch_norm(x, v1.get_variable("scale", [4]), tf.ones([4]), epsilon=EPSILON)
    for variable, value in zip(moving, found, strict=True):
        variable.assign(0.9 * variable + 0.1 * value)
    return tf.cast(tf.reduce_sum(x[:, 0] ** 2, [1, 2]), features.dtype)


def with_gradient_penalty(features, training):
    """The gradient of normalised outputs with respect to the features is part of the outputs."""
    x = layers.batch_normalization(tf.tanh(features @ v1.get_variable("k", [4, 5], features.dtype)), training)
    [slope] = tf.gradients(tf.reduce_sum(x**3), features)
    return tf.reduce_sum(x**2, 1) + tf.reduce_sum(slope**2, 1)


def of_kernels(features, training):
    """Weight standardisation beside batch normalisation: no batch, though it has as many rows."""
    kernel = v1.get_variable("k", [4, 6], features.dtype)
    mean, variance = tf.nn.moments(kernel, [0])
    x = features @ ((kernel - mean) * tf.math.rsqrt(variance + EPSILON))
    return tf.reduce_sum(layers.batch_normalization(x, training) ** 2 * tf.range(1.0, 7, dtype=x.dtype), 1)


def in_a_map(features, training):
    """Each example by itself, in a function of its own."""

    def normalized(row):
        mean, variance = tf.nn.moments(row, [0])
        return (row - mean) * tf.math.rsqrt(variance + EPSILON)

    rows = tf.reshape(features @ v1.get_variable("k", [4, 24], features.dtype), [-1, 6, 4])
    return tf.reduce_sum(tf.vectorized_map(normalized, rows)[:, 0] + tf.map_fn(normalized, rows)[:, 1] ** 2, 1)


def of_noise(features, training):
    """As a generator's: what is normalised comes from numbers drawn by example, and from no feature."""
    noise = layers.random_normal([features.shape[0], 4], dtype=features.dtype)
    x = noise @ v1.get_variable("k", [4, 5], features.dtype)
    mean, variance = tf.nn.moments(x, [0])
    return tf.reduce_sum(((x - mean) * tf.math.rsqrt(variance + EPSILON)) ** 3, 1) + tf.reduce_sum(features, 1)


def several(features, training):
    """Each of the others, in a scope of its own."""
    total = 0
    for network in (by_moments, with_gradient_penalty, of_kernels, in_a_map, of_noise):
        with v1.variable_scope(network.__name__):
            total += network(features, training)
    return total


@pytest.mark.parametrize(("network", "update", "tolerance"), [(several, "mirrored", 1e-9), (fused, "cpu", 1e-4)])
def test_towers_that_normalise_are_one_tower(network, update, tolerance):
    workload, examples = make()
    workload = dataclasses.replace(workload, inference=network)
    options = TRAIN | dict(learning_rate=0.001, variable_update=update)
    one = trainings.train(workload, examples, 3, batch_size=12, **options)
    found = trainings.train(workload, examples, 3, batch_size=6, num_gpus=2, **options)
    trainings.assert_same(found, one, tolerance)


def test_kernels_compute_what_plain_operations_do_and_have_their_gradients():
    """float64 has no kernels."""
    rng = np.random.default_rng(0)
    values = [rng.normal(2, 1, [3, 2, 4, 5]), rng.normal(size=[3, 2, 4, 5]), *rng.uniform(1, 2, [3, 5])]

    def run(dtype):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            x, grad, *of_channels = (tf.constant(value, dtype) for value in values)
            found = [*normalization._local_moments(x, dtype), normalization._scaled(x, *of_channels)]
            found += normalization._scaled_and_summed(grad, x, *of_channels[:2])
            total = tf.add_n([tf.reduce_sum(tf.sin(each)) for each in found])
            slopes = tf.gradients(total, [x, grad, *of_channels])
            return session.run([*found, *slopes]), {op.type for op in graph.get_operations()}

    (found, kernels), (expected, plain) = run(tf.float32), run(tf.float64)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert {"FusedBatchNormV3", "FusedBatchNormGradV3"} <= kernels - plain


def test_statistics_far_from_zero_are_combined_exactly():
    """A mean of squares less the square of the mean would lose all digits of this variance, in float32."""
    x = np.random.default_rng(0).normal(4096, 0.5, [16, 3]).astype(np.float32)
    seen = []

    def network(features, training):
        seen.append(tf.nn.moments(features, [0]))
        return features @ v1.get_variable("k", [3, 1])

    examples = Examples.from_arrays("far", x, np.zeros([16, 1], np.float32))
    workload = Workload("far", lambda _: None, network, lambda outputs, labels: tf.reduce_mean(outputs))
    with trainings.opened(workload, examples, num_gpus=4, batch_size=4) as (built, session):
        (mean, variance), *others = session.run((seen, built.report))[0]
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype(np.float64).var(0), rtol=1e-3)
    assert all(np.array_equal(mean, m) and np.array_equal(variance, v) for m, v in others)


@pytest.mark.parametrize(("over", "count"), [("global", 2), ("tower", 0)])
def test_a_layer_takes_one_collective_forwards_and_one_backwards(over, count):
    workload, examples = make()
    with trainings.opened(workload, examples, **TRAIN, batch_size=4, num_gpus=3, batch_norm=over) as (built, _):
        ops = [op.name for op in built.graph.get_operations() if op.type.startswith("Collective")]
    assert len([name for name in ops if name.startswith("tower_1/")]) == 2 * count  # of two layers
    assert any("by its own batch" in note for note in built.notes) == (over == "tower")


def test_tensorflows_own_functions_stay_as_they_are_outside_of_towers():
    normalization.replace_functions()
    values = np.array([[1.0, 2.0], [3.0, 6.0]])
    for moments in (v1.nn.moments, tf.nn.moments, tf.function(v1.nn.moments)):
        np.testing.assert_allclose(moments(tf.constant(values), [0]), [values.mean(0), values.var(0)])
    assert v1.nn.moments.__name__ == "moments" and v1.nn.fused_batch_norm.__doc__
