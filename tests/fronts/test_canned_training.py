"""Canned estimators train what numpy trains on the joined batches of all towers, under the names of 1.15."""

import re

import iris_program
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from feature_data import (
    CLASS,
    CLASS3,
    COUNT,
    DENSE,
    NUMBER,
    TARGET,
    WEIGHT,
    batches,
    config,
    input_fn,
    kind,
    number,
)

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
STEPS = 9
RATE = 2**-6
SGD = v1.train.GradientDescentOptimizer(RATE)
SUM, MEAN = v1.losses.Reduction.SUM, v1.losses.Reduction.SUM_OVER_BATCH_SIZE


def losses_of(model_dir, tag="loss"):
    return [event.value for event in jobs.events(model_dir).Scalars(tag)]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def squared(logits, labels):
    """Loss of each example, and its gradient by the logits."""
    return (logits - labels) ** 2, 2 * (logits - labels)


def logistic(logits, labels):
    return np.log1p(np.exp(logits)) - labels * logits, sigmoid(logits) - labels


def softmax(logits, labels):
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    hits = np.eye(logits.shape[1])[labels[:, 0]]
    return -np.log((p * hits).sum(1, keepdims=True)), p - hits


def trained(loss, labels, units, towers, weights=None, mean=False):
    """Gradient descent on a linear model; returns {kind, number, bias} and the loss of each step."""
    kernel, bias, losses = np.zeros([4, units]), np.zeros(units), []
    weights = np.ones(COUNT) if weights is None else weights
    for rows in batches(STEPS, towers):
        inputs, weight = DENSE[rows], weights[rows, np.newaxis]
        each, grad = loss(inputs @ kernel + bias, labels[rows, np.newaxis])
        share = 1 / len(rows) if mean else 1
        losses.append((each * weight).sum() * share)
        kernel -= RATE * share * inputs.T @ (grad * weight)
        bias -= RATE * share * (grad * weight).sum(0)
    return {"kind/weights": kernel[:3], "number/weights": kernel[3:], "bias_weights": bias}, losses


def assert_linear(estimator, expected):
    for name, value in expected.items():
        found = estimator.get_variable_value(f"linear/linear_model/{name}")
        np.testing.assert_allclose(found, value, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("towers", [1, 3])
class TestLinear:
    def test_classifier_of_two_classes_with_weights(self, tmp_path, towers):
        settings = config(towers, save_summary_steps=1)
        estimator = tf_estimator.LinearClassifier(
            [number, kind], tmp_path, weight_column="weight", optimizer=lambda: SGD, config=settings
        )
        estimator.train(input_fn(CLASS), steps=STEPS)
        expected, losses = trained(logistic, CLASS, 1, towers, WEIGHT)
        assert_linear(estimator, expected)
        np.testing.assert_allclose(losses_of(tmp_path), losses, rtol=1e-5)

    def test_classifier_of_three_classes_with_a_mean_loss(self, tmp_path, towers):
        estimator = tf_estimator.LinearClassifier(
            [number, kind], tmp_path, n_classes=3, optimizer=SGD, config=config(towers), loss_reduction=MEAN
        )
        estimator.train(input_fn(CLASS3), steps=STEPS)
        expected, _ = trained(softmax, CLASS3, 3, towers, mean=True)
        assert_linear(estimator, expected)


@pytest.mark.parametrize("towers, is_function", [(1, True), (2, False)])
def test_keras_optimizers(tmp_path, towers, is_function):
    makers = [lambda: keras.optimizers.SGD(RATE), lambda: keras.optimizers.SGD(RATE, momentum=0.5)]
    plain, with_momentum = makers if is_function else [make() for make in makers]
    estimator = tf_estimator.LinearRegressor([number, kind], tmp_path, optimizer=with_momentum, config=config(towers))
    estimator.train(input_fn(TARGET), steps=2).train(input_fn(TARGET), steps=3)
    inputs, weights, speed = np.c_[DENSE, np.ones(COUNT)], np.zeros([5, 1]), np.zeros([5, 1])
    for rows in batches(2, towers) + batches(3, towers):  # the second call goes on, with its input from the start
        grad = squared(inputs[rows] @ weights, TARGET[rows, np.newaxis])[1]
        speed = 0.5 * speed - RATE * inputs[rows].T @ grad
        weights = weights + speed
    parts = {"kind/weights": weights[:3], "number/weights": weights[3:4], "bias_weights": weights[4]}
    assert_linear(estimator, parts)
    assert estimator.get_variable_value("global_step") == 5

    both = tf_estimator.DNNLinearCombinedRegressor(
        tmp_path / "both", [kind], with_momentum, [number], plain, [3], config=config(towers)
    )
    both.train(input_fn(TARGET), steps=2)
    assert both.get_variable_value("global_step") == 2
    assert sum("momentum" in name for name in both.get_variable_names()) == 2  # of the kinds' weights and the bias


DNN = ["hiddenlayer_0/kernel", "hiddenlayer_0/bias", "logits/kernel", "logits/bias"]


def initial(model_dir, names):
    """Copies of values in the checkpoint of step 0."""
    return [np.float64(tf.train.load_variable(f"{model_dir}/model.ckpt-0", name)) for name in names]


def forward_and_gradients(values, inputs, labels):
    """A layer of relu units, the sum of squared errors, and its gradients."""
    kernel, bias, out, out_bias = values
    hidden = np.maximum(inputs @ kernel + bias, 0)
    return hidden @ out + out_bias, lambda grad: [
        inputs.T @ (grad @ out.T * (hidden > 0)), (grad @ out.T * (hidden > 0)).sum(0), hidden.T @ grad, grad.sum(0),
    ]  # fmt: skip


def test_wide_and_deep_parts_have_their_own_optimizers_and_a_common_loss(tmp_path, towers=2):
    estimator = tf_estimator.DNNLinearCombinedClassifier(
        tmp_path, [kind], SGD, [number], v1.train.GradientDescentOptimizer(2 * RATE), [3], config=config(towers)
    )
    estimator.train(input_fn(CLASS), steps=STEPS)
    names = [f"dnn/{name}" for name in DNN]
    values, wide, wide_bias = initial(tmp_path, names), np.zeros([3, 1]), np.zeros(1)
    for rows in batches(STEPS, towers):
        logits, gradients = forward_and_gradients(values, NUMBER[rows, np.newaxis], CLASS[rows])
        grad = logistic(logits + DENSE[rows, :3] @ wide + wide_bias, CLASS[rows, np.newaxis])[1]
        values = [value - 2 * RATE * part for value, part in zip(values, gradients(grad), strict=True)]
        wide, wide_bias = wide - RATE * DENSE[rows, :3].T @ grad, wide_bias - RATE * grad.sum(0)
    assert_linear(estimator, {"kind/weights": wide, "bias_weights": wide_bias})
    for name, value in zip(names, values, strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), value, rtol=1e-5, atol=2e-6, err_msg=name)
    assert estimator.get_variable_value("global_step") == STEPS
    tags = jobs.events(tmp_path).Tags()
    for layer in ("hiddenlayer_0", "logits"):  # 1.15's names
        assert f"dnn/dnn/{layer}/fraction_of_zero_values" in tags["scalars"]
        assert f"dnn/dnn/{layer}/activation" in tags["histograms"]


def test_batches_are_normalised_and_the_first_towers_statistics_kept(tmp_path):
    estimator = tf_estimator.DNNRegressor(
        [2], [number], tmp_path, optimizer=SGD, activation_fn=None, batch_norm=True, config=config(2)
    )
    estimator.train(input_fn(TARGET), steps=1)
    kernel, bias = initial(tmp_path, ["dnn/hiddenlayer_0/kernel", "dnn/hiddenlayer_0/bias"])
    hidden = NUMBER[:4, np.newaxis] @ kernel + bias
    moving = {"moving_mean": 0.001 * hidden.mean(0), "moving_variance": 0.999 + 0.001 * hidden.var(0)}
    for name, value in moving.items():
        found = estimator.get_variable_value(f"dnn/hiddenlayer_0/batchnorm_0/{name}")
        np.testing.assert_allclose(found, value, rtol=1e-5)
    norm = [f"batchnorm_0/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")]
    names = ["hiddenlayer_0/kernel", "hiddenlayer_0/bias", *(f"hiddenlayer_0/{name}" for name in norm), *DNN[2:]]
    values = [estimator.get_variable_value(f"dnn/{name}") for name in names]
    kernel, bias, gamma, beta, mean, variance, out, out_bias = values
    hidden = (NUMBER[:, np.newaxis] @ kernel + bias - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    found = [p["predictions"] for p in estimator.predict(input_fn(None, epochs=1))]
    np.testing.assert_allclose(found, hidden @ out + out_bias, rtol=1e-5, atol=1e-6)


def test_dropout_is_that_of_one_device_follows_the_seed_and_is_for_training_only(tmp_path):
    def train(towers, seed):
        settings = tf_estimator.RunConfig(num_gpus=towers, tf_random_seed=seed)
        estimator = tf_estimator.DNNRegressor(
            [200], [number], tmp_path / f"{towers} {seed}", optimizer=SGD, activation_fn=None, dropout=0.5,
            config=settings,
        )  # fmt: skip
        masks = []

        class Masks(v1.train.SessionRunHook):
            def before_run(self, run_context):
                graph = run_context.session.graph
                names = [f"{tower}dnn/dropout/dropout/GreaterEqual:0" for tower in ("", "tower_1/")[:towers]]
                return v1.train.SessionRunArgs([graph.get_tensor_by_name(name) for name in names])

            def after_run(self, run_context, run_values):
                masks.append(np.concatenate(run_values.results))

        data = {"number": np.ones(16, np.float32)}, np.ones(16), 8 // towers, None, False
        estimator.train(tf_estimator.inputs.numpy_input_fn(*data), hooks=[Masks()], steps=2)
        return estimator, np.array(masks)

    (first, two), (_, one), (_, other) = train(2, 3), train(1, 3), train(2, 4)
    np.testing.assert_array_equal(two, one)
    assert len({row.tobytes() for row in np.concatenate(two)}) == 16 and 0.3 < two.mean() < 0.7
    assert (two != other).any()
    predicted = [{p["predictions"][0] for p in first.predict(input_fn(None, epochs=1))} for _ in range(2)]
    assert predicted[0] == predicted[1]


def test_the_iris_program_of_the_guide_on_two_towers(tmp_path, capsys):
    iris_program.main(tmp_path, 2)
    printed = capsys.readouterr().out
    assert float(re.search(r"Test set accuracy: (\d\.\d+)", printed)[1]) > 0.9
    assert re.findall(r'Prediction is "(\w+)" \(\d+.\d%\), expected "\1"', printed) == iris_program.SPECIES


def test_a_hook_finds_the_librarys_own_names_of_ops_on_two_towers(tmp_path):
    estimator = tf_estimator.LinearRegressor([number], tmp_path, optimizer=SGD, config=config(2))
    logged = tf_estimator.LoggingTensorHook({"loss": "linear/head/weighted_loss/Sum"}, every_n_iter=1)
    estimator.train(input_fn(TARGET), hooks=[logged], steps=2)
    assert estimator.get_variable_value("global_step") == 2


def test_variables_have_the_names_of_1_15(tmp_path):
    embedding = tf.feature_column.embedding_column(kind, 2)
    crossed = tf.feature_column.crossed_column(["kind", tf.feature_column.bucketized_column(number, [0.0])], 5)
    estimator = tf_estimator.DNNLinearCombinedClassifier(
        tmp_path,
        [crossed, kind],
        "Ftrl",
        [embedding, number],
        "Adagrad",
        [4, 3],
        n_classes=3,
        config=config(2),
    )
    estimator.train(input_fn(CLASS3), steps=1)
    deep = [
        f"dnn/{layer}/{name}" for layer in ("hiddenlayer_0", "hiddenlayer_1", "logits") for name in ("kernel", "bias")
    ]
    deep.append("dnn/input_from_feature_columns/input_layer/kind_embedding/embedding_weights")
    wide = ["kind/weights", "kind_X_number_bucketized/weights", "bias_weights"]
    wide = [f"linear/linear_model/{name}" for name in wide]
    slots = [f"{name}/Adagrad" for name in deep] + [f"{name}/{slot}" for name in wide for slot in ("Ftrl", "Ftrl_1")]
    assert sorted(estimator.get_variable_names()) == sorted([*deep, *wide, *slots, "global_step"])
