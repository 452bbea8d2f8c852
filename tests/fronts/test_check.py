"""parallel_model.check shows on a few examples whether towers train what Keras trains."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_examples import EXAMPLES
from keras_twins import Adds

from tower_train import errors, multi_gpu_model
from tower_train.fronts import compat
from tower_train.fronts.keras_towers.proof import first_step
from tower_train.proof import comparison

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[16, 4]).astype(np.float32), RNG.integers(3, size=16)
WEIGHTS = RNG.uniform(0.5, 2, 16).astype(np.float32)


class Centered(keras.layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0)


class Looked(keras.layers.Layer):
    """Adds a vector of an embedding, whose gradient is sparse, and a one_hot of what argmax looks at in float32."""

    def build(self, shape):
        self.vectors = keras.layers.Embedding(2, shape[-1])

    def call(self, inputs):
        largest = keras.ops.one_hot(keras.ops.argmax(inputs, -1), inputs.shape[-1], dtype=inputs.dtype)
        return inputs + largest + self.vectors(keras.ops.cast(inputs[:, 0] > 0, "int32"))


def adam():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def parallel(*layers, optimizer="sgd", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(3)])
    model = multi_gpu_model(model, gpus=2, **options)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_towers_that_train_what_keras_trains_are_shown_to():
    within = keras.Sequential([keras.Input([4]), Looked()])
    model = parallel(within, keras.Model(x := keras.Input([4]), Looked()(x)), optimizer=adam())
    before = model.template.get_weights()
    line = model.check(X, Y)
    assert line.startswith("towers:   2 equal 1 on this network to ") and " examples, float64" in line
    assert all((one == other).all() for one, other in zip(before, model.template.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (lambda x: keras.layers.AveragePooling3D((2, 1, 1))(x[..., None, None, None])[:, :, 0, 0, 0], "No OpKernel"),
        (lambda x: keras.ops.cast(x, "float32"), r"Cast \(.*:\d+\) computes in float32"),
    ],
)
def test_a_model_that_cannot_be_computed_in_float64_is_compared_in_its_own_dtype(layers, reason):
    assert keras.config.floatx() == "float32"
    line = parallel(keras.layers.Dense(4), keras.layers.Lambda(layers)).check(X, Y)
    assert re.search(rf"examples, float32; \d+\.\d s\)\. In float64: {reason}", line)


class Refusing(keras.layers.Layer):
    refused = None

    def call(self, inputs):
        if inputs.dtype.name == self.refused:
            raise errors.GraphError("Not so.\nTake another.")
        return inputs


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_layers_own_error_keeps_its_lines_and_no_other(dtype):
    layer = Refusing()
    model = parallel(layer)
    layer.refused = dtype
    with pytest.raises(errors.GraphError, match=r"\ANot so\.\nTake another\.\Z"):
        model.check(X, Y)


def test_weights_that_only_decay_show_nothing():
    line = parallel(optimizer=adam()).check(X, Y, 0 * WEIGHTS)
    assert line.startswith("*** towers: nothing to compare: every gradient of the loss is 0")


def test_variables_beyond_memory_are_compared_in_float32_or_not_at_all(monkeypatch):
    numbers = 4 * 3 + 3 + 4  # weights, the optimizer's rate and counter, a metric's sum and count
    monkeypatch.setattr(comparison.host, "free_memory", lambda: 8 * 4 * numbers)
    model = parallel()
    assert model.check(X, Y).endswith(f"In float64: {numbers} numbers in variables would take 0 GiB of memory")
    monkeypatch.setattr(comparison.host, "free_memory", lambda: 8 * 4 * numbers - 1)
    with pytest.raises(MemoryError, match=f"{numbers} numbers in variables"):
        model.check(X, Y)


def test_too_few_examples_are_refused_and_before_a_training_only_told(capsys):
    model, few = parallel(), (X[:3], Y[:3])
    with pytest.raises(errors.ConfigError, match="fewer than 4 examples, one for each of 2 towers in 2 steps"):
        model.check(*few)
    assert first_step(model, list)(iter([few])) == [few]
    assert "not compared with one device, as that fails: check: there are fewer than 4" in capsys.readouterr().out


def test_an_output_whose_first_axis_is_as_long_as_a_batch_is_named():
    """A pair of scores [2, batch], compared on towers' batches of 2."""
    pair = keras.layers.Lambda(keras.ops.transpose, name="pair")
    model = multi_gpu_model(keras.Sequential([keras.Input([4]), keras.layers.Dense(2), pair]), gpus=2)
    model.compile("sgd", lambda _, scores: keras.ops.mean((scores[0] - scores[1] - 1) ** 2))
    with pytest.raises(errors.GraphError, match="sequential.*: its output pair, whose first axis must be the batch"):
        model.check(X[:8], Y[:8])


def test_batch_normalisation_by_tower_is_not_said_to_be_one_device():
    line = parallel(keras.layers.Dense(4), keras.layers.BatchNormalization(), batch_norm="tower").check(X, Y)
    assert re.match(
        r"\*\*\* towers: 2 are not 1 with batch_norm=tower: \S+ differs by \de-0\d on this network, and by "
        r"\de-1\d with batch_norm=global",
        line,
    )


def test_takes_what_fit_takes_and_other_rows_in_each_step(monkeypatch):
    rows, train_on = [], compat.train_on
    monkeypatch.setattr(compat, "train_on", lambda *args: rows.append(args[1][1]) or train_on(*args))
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), Y, WEIGHTS)).batch(5)
    assert "2 equal 1 on this network" in parallel().check(data)
    assert np.concatenate(rows).tolist() == [*Y, *Y]  # on one device, in towers


class Scaled(keras.layers.Layer):
    """Multiplies by the number of examples, if the shape tells it."""

    def call(self, inputs):
        return inputs * (inputs.shape[0] or 1)


def test_batches_of_no_fixed_size_are_compared_as_such():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
    assert "2 equal 1 on this network" in parallel(Scaled()).check(data.batch(4))
    with pytest.raises(errors.GraphError, match="2 towers differ from 1"):
        parallel(Scaled()).check(data.batch(4, drop_remainder=True))


def test_a_first_fit_compares_few_examples_if_it_takes_long_and_then_trains_as_if_it_had_not(
    compared, capsys, monkeypatch
):
    monkeypatch.setattr(comparison, "SECS_OF_NUMBER", 1)

    def fitted(**options):
        keras.utils.set_random_seed(1)
        model = parallel(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), **options)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(2).shuffle(32, seed=1).batch(19)
        model.fit(data, shuffle=False, verbose=0)
        return model.get_weights(), np.random.rand(), capsys.readouterr().out

    weights, drawn, said = fitted()
    expected, drawn_without, said_without = fitted(check_towers="never")
    assert said.count("2 equal 1") == 1
    assert re.search(r"comparing 2 with 1, for .*\n.* 2 equal 1 on this network to .*\(2 steps of 4 examples", said)
    assert drawn == drawn_without and "comparing" not in said_without and "equal" not in said_without
    assert all((one == other).all() for one, other in zip(weights, expected, strict=True))


def test_a_first_fit_of_towers_that_differ_names_the_layer_unless_it_compares_nothing(compared):
    line = Centered.call.__code__.co_firstlineno
    with pytest.raises(
        errors.GraphError, match=rf"begins at \S+/centered\S* \(Centered, test_check.py:{line}\).*\n.*never"
    ):
        parallel(keras.layers.Dense(4), Centered()).fit(X, Y, batch_size=8, verbose=0)
    with pytest.raises(errors.GraphError, match=r"begins at \S+/centered.*\n.*never"):
        parallel(Centered()).train_on_batch(X, Y)
    parallel(Centered(), check_towers="never").fit(X, Y, batch_size=8, verbose=0)
    with pytest.raises(errors.GraphError, match=r"\(Adds, .*\): the loss that it adds, which is no mean over examples"):
        parallel(keras.layers.Dense(4), Adds(lambda x: [keras.ops.mean(x**2), keras.ops.sum(x**2)])).check(X, Y)


def test_a_first_train_on_batch_compares_and_then_trains_on_its_batch(compared, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "_LONG_SECS", 1e9)
    model = parallel()
    kernel, bias = model.get_weights()
    loss = model.train_on_batch(X, Y, WEIGHTS)
    assert re.fullmatch(r"towers:   2 equal 1 on this network to .*\n", capsys.readouterr().out)
    logits = X @ kernel + bias
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(16), Y]
    np.testing.assert_allclose(loss, (WEIGHTS * losses).sum() / 16, rtol=1e-6)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    of_logits = WEIGHTS[:, None] * (chances - np.eye(3)[Y]) / 16
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.01 * X.T @ of_logits, atol=1e-7)


def test_steps_of_an_optimizer_that_accumulates_gradients_are_compared():
    model = parallel()
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
    assert "2 equal 1 on this network to" in model.check(X, X[:, :3])


def test_a_step_with_optimizers_of_its_own_is_left_as_it_was():
    example = EXAMPLES["contrastive_and_momentum"]
    model, data = example.build(), example.data()
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile(**example.compiled())
    model.run_eagerly = True  # which takes less time than to trace the one step
    model.fit(**data, verbose=0)
    model.run_eagerly = False
    variables = [*model.optimizer.variables, *model.probe_optimizer.variables, *model.variables]
    before = [variable.numpy() for variable in variables]
    assert parallel.check(**data).startswith("towers:   2 equal 1 on this network to ")
    after = [variable.numpy() for variable in variables]
    assert len(before) > 20 and all((one == other).all() for one, other in zip(before, after, strict=True))


def test_a_plain_model_in_another_thread_computes_as_always():
    model, plain = parallel(keras.layers.Dropout(0.5)), parallel().template
    expected, done, found = plain(X).numpy(), threading.Event(), []

    def compute():
        policy = keras.config.dtype_policy().name
        while not done.wait(0.01):
            outputs = plain(X)
            made = keras.layers.Dense(1)
            found.append(
                (policy, outputs.dtype, keras.config.floatx(), made.compute_dtype, np.abs(outputs - expected).max())
            )
            plain.train_on_batch(X, Y)
            plain.set_weights(weights)

    weights = plain.get_weights()
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        model.fit(X, Y, batch_size=8, verbose=0)  # before, so that the check may not use the functions that it traced
        assert ", float64; " in model.check(X, Y)
    finally:
        done.set()
        thread.join()
    assert len(found) > 5 and set(found) == {("float32", tf.float32, "float32", "float32", 0.0)}


def test_what_no_training_can_build_is_not_said_to_train_all_the_same():
    def refuse():
        raise errors.GraphError("an update is inside of a branch.")

    with pytest.raises(errors.GraphError, match="^an update is inside of a branch.$"):
        comparison.before_training(refuse, "check_towers='never'")
