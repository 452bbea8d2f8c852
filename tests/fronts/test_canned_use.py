"""Canned estimators evaluate, predict, export and load as those of TensorFlow 1.15 did, and refuse what cannot be."""

import os

import numpy as np
import pytest
import tensorflow as tf
from feature_data import CLASS, CLASS3, COUNT, DENSE, KIND, TARGET, WEIGHT, X, config, input_fn, kind, number

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
NAMES = ["no", "yes"]
STRINGS = np.array(NAMES)[CLASS]


def checkpoint(directory, values):
    """Writes a model_dir's checkpoint of variables with these names and values."""
    directory.mkdir(exist_ok=True)
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.train.create_global_step()
        for name, value in values.items():
            v1.get_variable(name, initializer=np.asarray(value, np.float32))
        session.run([v1.global_variables_initializer()])
        session.run(step.assign(100))
        return v1.train.Saver().save(session, str(directory / "model.ckpt"), step)


LINEAR = {
    "linear/linear_model/number/weights": [[1.5]],
    "linear/linear_model/kind/weights": [[-1.0], [0.5], [2.0]],
    "linear/linear_model/bias_weights": [-0.75],
    # The names of 1.15's optimizer slots, which nothing but training needs.
    "linear/linear_model/number/weights/part_0/Ftrl": [[0.1]],
}
LOGITS = DENSE @ [[-1.0], [0.5], [2.0], [1.5]] - 0.75
PROBABILITY = 1 / (1 + np.exp(-LOGITS[:, 0]))


def weighted(values, weights):
    return np.sum(values * weights) / np.sum(weights)


def area(labels, scores, weights):
    """The area under the ROC curve: the share of pairs of a positive and a negative in the right order."""
    positive = labels > 0
    pairs = weights[positive][:, np.newaxis] * weights[~positive]
    order = np.sign(scores[positive][:, np.newaxis] - scores[~positive])
    return np.sum(pairs * (order + 1) / 2) / np.sum(pairs)


@pytest.mark.parametrize("weights", [None, WEIGHT])
def test_metrics_of_two_classes_of_a_checkpoint_of_1_15(tmp_path, weights):
    checkpoint(tmp_path, LINEAR)
    column = None if weights is None else "weight"
    estimator = tf_estimator.LinearClassifier([number, kind], tmp_path, weight_column=column, label_vocabulary=NAMES)
    found = estimator.evaluate(input_fn(STRINGS, epochs=1, batch=10))
    w, hit = np.ones(COUNT) if weights is None else weights, PROBABILITY > 0.5
    losses = -np.log(np.where(CLASS, PROBABILITY, 1 - PROBABILITY))
    mean = weighted(CLASS, w)
    assert found == pytest.approx({
        "accuracy": weighted(hit == CLASS, w),
        "accuracy_baseline": max(mean, 1 - mean),
        "auc": area(CLASS, PROBABILITY, w),
        "auc_precision_recall": found["auc_precision_recall"],
        "average_loss": weighted(losses, w),
        "label/mean": mean,
        "loss": np.mean([np.sum((losses * w)[i : i + 10]) for i in range(0, COUNT, 10)]),
        "precision": weighted(CLASS[hit], w[hit]),
        "prediction/mean": weighted(PROBABILITY, w),
        "recall": weighted(hit[CLASS > 0], w[CLASS > 0]),
        "global_step": 100,
    }, rel=1e-5, abs=2e-3)  # fmt: skip
    assert found["average_loss"] == pytest.approx(weighted(losses, w), rel=1e-5)
    assert 0.9 < found["auc_precision_recall"] <= 1


def test_metrics_of_three_classes_and_of_numbers(tmp_path):
    classifier = tf_estimator.BaselineClassifier(tmp_path / "c", 3)
    checkpoint(tmp_path / "c", {"baseline/bias": np.log([0.2, 0.5, 0.3])})
    found = classifier.evaluate(input_fn(CLASS3, epochs=1, batch=COUNT))
    losses = -np.log([0.2, 0.5, 0.3])[CLASS3]
    expected = {
        "accuracy": np.mean(CLASS3 == 1),
        "average_loss": losses.mean(),
        "loss": losses.sum(),
        "global_step": 100,
    }
    assert found == pytest.approx(expected, rel=1e-5)
    regressor = tf_estimator.BaselineRegressor(tmp_path / "r", label_dimension=2, weight_column="weight")
    checkpoint(tmp_path / "r", {"baseline/bias": [1.0, -1.0]})
    labels = np.c_[TARGET, TARGET + 3]
    found = regressor.evaluate(input_fn(labels, epochs=1, batch=COUNT))
    losses, w = (labels - [1, -1]) ** 2, WEIGHT[:, np.newaxis]
    expected = {
        "average_loss": np.sum(losses * w) / np.sum(w) / 2, "loss": np.sum(losses * w), "prediction/mean": 0.0,
        "label/mean": np.sum(labels * w) / np.sum(w) / 2, "global_step": 100,
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_predictions_have_the_names_of_1_15(tmp_path):
    checkpoint(tmp_path, LINEAR)
    estimator = tf_estimator.LinearClassifier([number, kind], tmp_path, label_vocabulary=NAMES)
    [batch] = estimator.predict(input_fn(None, epochs=1, batch=COUNT), yield_single_examples=False)
    hit = (PROBABILITY > 0.5).astype(int)[:, np.newaxis]
    expected = {
        "logits": LOGITS, "logistic": PROBABILITY[:, np.newaxis], "class_ids": hit,
        "probabilities": np.c_[1 - PROBABILITY, PROBABILITY], "all_class_ids": np.tile([0, 1], [COUNT, 1]),
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(batch[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(batch["classes"], np.array(NAMES, "S")[hit])
    np.testing.assert_array_equal(batch["all_classes"], np.tile(np.array(NAMES, "S"), [COUNT, 1]))
    assert batch.keys() == expected.keys() | {"classes", "all_classes"}
    three = tf_estimator.BaselineClassifier(tmp_path / "3", 3)
    prediction = next(three.predict(input_fn(None)))
    assert list(prediction["all_classes"]) == [b"0", b"1", b"2"] and prediction["classes"] == [b"0"]
    assert "logistic" not in prediction


def served(directory):
    """{signature: its outputs} for the first two examples."""
    examples = [
        tf.train.Example(features=tf.train.Features(feature={
            "number": tf.train.Feature(float_list=tf.train.FloatList(value=[X["number"][i]])),
            "kind": tf.train.Feature(bytes_list=tf.train.BytesList(value=[X["kind"][i].encode()])),
        })).SerializeToString()
        for i in range(2)
    ]  # fmt: skip
    with tf.Graph().as_default(), v1.Session() as session:
        signatures = v1.saved_model.load(session, [tf.saved_model.SERVING], directory).signature_def
        outputs = {}
        for name, signature in signatures.items():
            [fed] = signature.inputs.values()
            fetched = {key: info.name for key, info in signature.outputs.items()}
            outputs[name] = session.run(fetched, {fed.name: examples})
        return outputs


def test_exports_classify_regress_and_predict(tmp_path):
    checkpoint(tmp_path / "model", LINEAR)
    columns = [number, kind]
    receive = tf_estimator.export.build_parsing_serving_input_receiver_fn(
        tf.feature_column.make_parse_example_spec(columns)
    )
    classifier = tf_estimator.LinearClassifier(
        columns, tmp_path / "model", label_vocabulary=NAMES, weight_column="weight"
    )
    outputs = served(os.fsdecode(classifier.export_saved_model(tmp_path / "export", receive)))
    assert outputs.keys() == {"serving_default", "classification", "regression", "predict"}
    for name in ("serving_default", "classification"):
        np.testing.assert_allclose(outputs[name]["scores"][:, 1], PROBABILITY[:2], rtol=1e-5)
        assert outputs[name]["classes"].tolist() == [[b"no", b"yes"]] * 2
    np.testing.assert_allclose(outputs["regression"]["outputs"][:, 0], PROBABILITY[:2], rtol=1e-5)
    np.testing.assert_allclose(outputs["predict"]["logits"], LOGITS[:2], rtol=1e-5)
    regressor = tf_estimator.LinearRegressor(columns, tmp_path / "model")
    outputs = served(os.fsdecode(regressor.export_saved_model(tmp_path / "export 2", receive)))
    assert outputs.keys() == {"serving_default", "regression", "predict"}
    np.testing.assert_allclose(outputs["serving_default"]["outputs"], LOGITS[:2], rtol=1e-5)


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


def test_weights_of_1_15_begin_a_training(tmp_path):
    checkpoint(tmp_path / "old", LINEAR)
    estimator = tf_estimator.LinearClassifier(
        [number, kind], tmp_path / "new", optimizer=v1.train.GradientDescentOptimizer(1e-9), config=config(2),
        warm_start_from=str(tmp_path / "old"),
    )  # fmt: skip
    estimator.train(input_fn(CLASS), steps=1)
    for name in ("number/weights", "kind/weights", "bias_weights"):
        name = f"linear/linear_model/{name}"
        np.testing.assert_allclose(estimator.get_variable_value(name), LINEAR[name], atol=1e-6)


def test_columns_that_hold_several_categories_are_combined(tmp_path):
    many = {"kind": np.array([["p", "q"], ["q", ""]]), "number": np.zeros(2)}
    checkpoint(tmp_path, LINEAR)
    for combiner, first in [("sum", -0.5), ("mean", -0.25), ("sqrtn", -0.5 / 2**0.5)]:
        estimator = tf_estimator.LinearRegressor([number, kind], tmp_path, sparse_combiner=combiner)
        fed = tf_estimator.inputs.numpy_input_fn(many, shuffle=False)
        predictions = [p["predictions"][0] for p in estimator.predict(fed)]
        assert predictions == pytest.approx([first - 0.75, 0.5 - 0.75], rel=1e-5)


def test_parsing_specs_hold_columns_label_and_weight():
    fixed, var = tf.io.FixedLenFeature, tf.io.VarLenFeature
    columns = {"number": fixed((1,), tf.float32, None), "kind": var(tf.string)}
    assert tf_estimator.classifier_parse_example_spec([number, kind], "y", tf.string, weight_column="weight") == {
        **columns, "y": fixed((1,), tf.string, None), "weight": fixed((1,), tf.float32, None),
    }  # fmt: skip
    found = tf_estimator.regressor_parse_example_spec([number, kind], "y", label_default=0.0, label_dimension=3)
    assert found == {**columns, "y": fixed((3,), tf.float32, 0.0)}


def test_weights_may_be_normalised_and_of_each_number(tmp_path):
    half = tf.feature_column.numeric_column("weight", normalizer_fn=lambda w: w / 2)
    checkpoint(tmp_path, {"baseline/bias": [0.0, 0.0]})
    labels = np.c_[TARGET, TARGET + 1]
    found = tf_estimator.BaselineRegressor(tmp_path, 2, half).evaluate(input_fn(labels, epochs=1, batch=COUNT))
    assert found["loss"] == pytest.approx(np.sum(labels**2 * WEIGHT[:, np.newaxis] / 2), rel=1e-5)
    each = np.c_[WEIGHT, KIND].astype(np.float32)
    fed = tf_estimator.inputs.numpy_input_fn({"each": each}, labels, COUNT, shuffle=False)
    found = tf_estimator.BaselineRegressor(tmp_path, 2, "each").evaluate(fed)
    assert found["loss"] == pytest.approx(np.sum(labels**2 * each), rel=1e-5)
