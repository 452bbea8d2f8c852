"""keras_network: what Keras computes, by the towers' rules."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings
from keras_workload import CLASSES, SIZE, drawing, images, opened, small, train

import tower_train
from tower_train import errors, layers

v1 = tf.compat.v1
SLOTS = {"Momentum", "ExponentialMovingAverage"}


@pytest.fixture(scope="module")
def examples():
    return images()


def before_and_after(session, built, steps):
    """{variable's name: value} before some steps and after them, and their losses."""
    variables = {variable.op.name: variable for variable in built.saved.variables}
    start = session.run(variables)
    losses = [float(session.run(built.report).loss) for _ in range(steps)]
    return start, session.run(variables), losses


def test_a_model_that_build_loads_compiled_trains_as_the_plain_one(examples, float64, tmp_path):
    model = small()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())  # of both classes that are patched
    model.compile(optimizer, "mse", metrics=["mae", keras.metrics.Mean()])
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "m.keras")
    load = lambda: keras.models.load_model(tmp_path / "m.keras", compile=False)  # noqa: E731
    trainings.assert_same(
        train(examples, lambda: keras.models.load_model(tmp_path / "m.keras"), 1), train(examples, load, 1)
    )


def adamw():
    made = keras.optimizers.AdamW(0.05, weight_decay=0.3, epsilon=1e-8)
    made.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return made


@pytest.mark.parametrize(
    ("optimizer", "options", "tolerance"),
    [
        (lambda: keras.optimizers.SGD(0.05, momentum=0.9), {}, 1e-9),
        (adamw, dict(optimizer="adamw", weight_decay=0.3), 1e-6),  # Keras rounds Adam's coefficients to float32
    ],
)
def test_a_step_is_the_one_that_keras_does(examples, float64, optimizer, options, tolerance):
    with opened(examples, small, batch_size=24, ema=0.0, **options) as (built, session):
        start, ended, [loss] = before_and_after(session, built, 1)
    model = keras.models.clone_model(small())
    layers = [layer for layer in model.layers if layer.weights]
    ours = ["conv2d", "batch_normalization", "conv2d_1", "batch_normalization_1", "dense"]
    variables = {f"{name}/{v.name}": v for name, layer in zip(ours, layers, strict=True) for v in layer.variables}
    others = {*SLOTS, "Adam", "Adam_1", "beta1_power", "beta2_power", "global_step", "examples_seen"}
    assert {name for name in start if name.rpartition("/")[2] not in others} == set(variables)
    for name, variable in variables.items():
        variable.assign(start[name])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss_fn, run_eagerly=True)
    images, labels = examples.first(24)
    expected = model.train_on_batch(images.astype(np.float64), labels)
    assert loss == pytest.approx(float(expected), rel=1e-9)
    for name, variable in variables.items():
        np.testing.assert_allclose(ended[name], variable.numpy(), rtol=1e-6, atol=tolerance, err_msg=name)
        assert not np.array_equal(ended[name], start[name]), name


def with_tables():
    words = keras.Input([], dtype="string")
    known = keras.layers.StringLookup(vocabulary=["cat", "dog", "bird"])(words)
    hashed = keras.layers.Hashing(5, salt=7)(words)
    vectors = keras.layers.TextVectorization(vocabulary=["the", "cat", "dog"], output_sequence_length=2)(words)
    found = [keras.layers.Flatten()(keras.layers.Embedding(6, 2)(ids)) for ids in (known, hashed, vectors)]
    found[2] = keras.layers.Dropout(0.5)(found[2])
    scaled = keras.layers.concatenate(found) * keras.ops.arange(0.5, 4.5, 0.5)  # an eager tensor
    last = keras.layers.Dense(CLASSES)
    last.operations = ["of a user"]  # Keras' own models have an attribute of this name
    return keras.Model(words, last(scaled))


def test_layers_with_tables_look_up_in_each_graph_what_keras_does():
    rng = np.random.default_rng(0)
    words = np.array([b"cat", b"dog", b"bird", b"cow"])[rng.integers(4, size=24)]
    texts = tower_train.Examples.from_arrays("words", words, rng.integers(0, CLASSES, 24), ["a", "b", "c"])
    one = train(texts, with_tables, 2)
    trainings.assert_same(train(texts, with_tables, 2, num_gpus=2, batch_size=4), one, 1e-6)  # words have no float64

    model = with_tables()
    model.set_weights(
        [np.full(v.shape, 0.1) * np.arange(v.shape[0]).reshape([-1] + [1] * (len(v.shape) - 1)) for v in model.weights]
    )
    network = tower_train.keras_network(lambda: model)
    with tf.Graph().as_default(), v1.Session() as session:
        outputs = network(tf.constant(words), training=False)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        found = session.run(outputs)
    np.testing.assert_allclose(found, model(tf.constant(words)), rtol=1e-6)


def test_initial_values_follow_the_seed_and_the_names_only_and_keras_is_left_as_it_was(examples):
    before = keras.config.floatx(), keras.config.dtype_policy().name
    _, last = keras.layers.Dense(1), keras.layers.Dense(1).name
    first = train(examples, small, 0)[1]
    assert (keras.config.floatx(), keras.config.dtype_policy().name) == before
    assert keras.layers.Dense(1).name == f"dense_{int(last.removeprefix('dense_')) + 1}"
    keras.layers.Conv2D(1, 1)  # so that Keras would number the next ones differently
    again = train(examples, small, 0, num_gpus=2)[1]
    other = train(examples, small, 0, seed=1)[1]
    assert first.keys() == again.keys() == other.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    for name in ("conv2d/kernel", "conv2d_1/kernel", "dense/kernel"):
        assert not np.array_equal(first[name], other[name])
        shape = first[name].shape
        limit = np.sqrt(6 / (np.prod(shape[:-2]) * sum(shape[-2:])))  # Glorot and Bengio 2010, equation 16
        assert 0.7 * limit < np.abs(first[name]).max() <= limit


def test_a_model_made_elsewhere_begins_with_its_values(examples):
    model = small()
    images = np.ones([2, SIZE, SIZE, 2], np.float32)
    before = model.predict(images, verbose=0)
    start = train(examples, lambda: model, 0, dtype="float32")[1]
    np.testing.assert_array_equal(model.predict(images, verbose=0), before)
    for variable in model.variables:
        np.testing.assert_array_equal(start[variable.path], variable.numpy())


def freezing(count):
    def make():
        model = small()
        for layer in model.layers[:count]:
            layer.trainable = False
        return model

    return make


def test_frozen_layers_stay_as_they_are_and_cost_nothing(examples):
    def make():
        model = freezing(4)()
        model.get_layer("batch_normalization").moving_mean.assign([1.0, 2, 3, 4])
        return model

    options = dict(num_gpus=2, dtype="float32", learning_rate=0.1, batch_norm="tower")
    with opened(examples, make, **options) as (built, session):
        start, ended, _ = before_and_after(session, built, 2)
    frozen = {"conv2d", "batch_normalization"}
    trained = {"conv2d_1", "batch_normalization_1", "dense"}
    for name in start:
        layer = name.partition("/")[0]
        if layer in frozen:
            assert ended[name].tobytes() == start[name].tobytes(), name
            assert name.rpartition("/")[2] not in SLOTS
        elif layer in trained:
            assert not np.array_equal(ended[name], start[name]), name
    assert np.array_equal(ended["batch_normalization/moving_mean"], [1, 2, 3, 4])

    # What a step computes of the graph: TensorFlow adds ops to it that it never runs.
    needed = v1.graph_util.extract_sub_graph(built.graph.as_graph_def(), [built.train_op.name]).node
    gradients = [node.op for node in needed if "/gradients/" in node.name]
    assert gradients.count("Conv2DBackpropFilter") == gradients.count("FusedBatchNormGradV3") == 2
    assert gradients.count("MatMul") == 4
    assert "Conv2DBackpropInput" not in gradients, "nothing goes back through a frozen layer"
    assert {name.split(" of ")[-1].partition("/")[0] for name in built.checked[1:]} == trained


def test_frozen_batch_normalisation_uses_its_moving_statistics(examples):
    """With everything but the last layer frozen, training sees what evaluation sees."""
    with opened(examples, freezing(7), batch_size=24) as (built, session):
        start, ended, [loss] = before_and_after(session, built, 1)
    assert [ended[name].tobytes() == start[name].tobytes() for name in start if name.startswith("batch")] == [True] * 7
    network = tower_train.keras_network(small)
    images, labels = examples.first(24)
    with tf.Graph().as_default(), v1.Session() as session:
        logits = network(tf.constant(images, tf.float64), training=False)
        session.run([v.assign(start[v.op.name]) for v in v1.global_variables()])
        logits = session.run(logits)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert loss == pytest.approx(-logits[np.arange(24), labels].mean(), rel=1e-9)


def test_a_network_that_is_called_twice_has_its_weights_once(examples):
    network = tower_train.keras_network(drawing())
    twice = tower_train.Workload("twice", None, lambda x, training: network(x, training) + network(-x, training))
    _, variables = trainings.train(twice, examples, 1, num_gpus=2, batch_size=4)
    assert [name for name in variables if name.endswith("kernel")] == ["dense/kernel"]


@pytest.mark.parametrize(("dtype", "kept"), [("float64", "float64"), ("bfloat16", "float32")])
def test_a_network_of_integers_computes_in_the_runs_dtype(dtype, kept):
    computed = []

    def build():
        words = keras.Input((3,), dtype="int32")
        means = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(words))
        computed.append(means.dtype)
        return keras.Model(words, keras.layers.Dense(2)(means))

    words = np.arange(24, dtype=np.int32).reshape(8, 3) % 9
    examples = tower_train.Examples.from_arrays("words", words, np.arange(8) % 2)
    workload = tower_train.Workload("words", None, tower_train.keras_network(build))
    _, variables = trainings.train(workload, examples, 1, batch_size=8, dtype=dtype)
    assert computed == [dtype] and variables["dense/kernel"].dtype == kept


def test_constraints_hold_after_a_step(examples):
    ended = train(examples, functools.partial(small, constraint=keras.constraints.UnitNorm(axis=[0, 1, 2])), 2)[1]
    np.testing.assert_allclose(np.sqrt(np.sum(ended["conv2d_1/kernel"] ** 2, axis=(0, 1, 2))), 1, rtol=1e-6)


def ending_in(*before):
    inputs = [keras.Input([SIZE, SIZE, 2]), keras.layers.Flatten()]
    return lambda: keras.Sequential([*inputs, *(make() for make in before), keras.layers.Dense(CLASSES)])


GENERATOR = keras.random.SeedGenerator(3)  # of no layer


def of_gamma(x):
    return x + keras.random.gamma(keras.ops.shape(x), 1.0, seed=GENERATOR, dtype=x.dtype)


def within(block):
    def make():
        with block():
            return ending_in()()

    return make


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (within(layers.frozen), {}, "layers.frozen: has no effect on the layers of a Keras network. Set layer"),
        (within(layers.param_group), {}, "layers.param_group: has no effect on the layers of a Keras network"),
        (lambda: keras.Sequential([keras.layers.Dense(3)], name="mine"), {}, "returned mine, which has no variables"),
        (lambda: None, {}, r"build\(\) returned None"),
        (ending_in(functools.partial(keras.layers.ActivityRegularization, 0.1)), {}, "add to the loss"),
        (
            lambda: keras.Sequential([keras.Input([SIZE + 1, SIZE, 2]), keras.layers.Flatten()]),
            {},
            r"sequential takes \w+ \[None, 7, 6, 2\], and the examples give float64 \[None, 6, 6, 2\]",
        ),
        (
            lambda: keras.Sequential([keras.Input([SIZE, SIZE, 2], dtype="string"), keras.layers.Flatten()]),
            {},
            r"sequential takes string \[None, 6, 6, 2\], and the examples give float64",
        ),
        (ending_in(lambda: keras.layers.Lambda(of_gamma)), {}, "draws by keras.random.gamma from a SeedGenerator"),
    ],
)
def test_what_towers_cannot_do_is_refused(examples, make, options, text):
    with pytest.raises(errors.UserError, match=text):
        train(examples, make, 0, **options)


def test_other_batch_normalisation_is_over_all_towers_too(examples):
    kinds = {"synchronized": True}, {"synchronized": True, "axis": 1}
    make = drawing(*(functools.partial(keras.layers.BatchNormalization, **kind) for kind in kinds))
    one = train(examples, make, 2, batch_size=12)
    trainings.assert_same(train(examples, make, 2, num_gpus=3, batch_size=4), one)


def test_moments_that_a_layer_adapted_to_are_those_of_the_checkpoint():
    """The program that evaluates may build the model without what they were made from."""

    def build():
        scaled = keras.layers.Normalization(name="scaled")
        scaled.adapt(np.array([[1.0], [3.0]]))
        return keras.Sequential([keras.Input([1]), scaled])

    network = tower_train.keras_network(build)
    with tf.Graph().as_default(), v1.Session() as session:
        outputs = network(tf.constant([[5.0]]), training=False)
        session.run(v1.global_variables_initializer())
        assert session.run(outputs).tolist() == [[3.0]]
        mean, variance = (v for v in v1.global_variables() if "count" not in v.op.name)
        session.run([mean.assign([1.0]), variance.assign([4.0])])
        assert session.run(outputs).tolist() == [[2.0]]
