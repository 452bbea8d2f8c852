"""Programs of TensorFlow's guides for 1.x run with tower_train.estimator instead of tf.estimator."""

import re

import iris_program
import numpy as np
import tensorflow as tf

from tower_train import estimator as tf_estimator

CENSUS_COLUMNS = ["age", "workclass", "education", "occupation", "hours_per_week", "income_bracket"]
CENSUS_DEFAULTS = [[0], [""], [""], [""], [0], [""]]
EDUCATIONS = ["Bachelors", "HS-grad", "Masters"]


def test_iris_on_two_towers(tmp_path, capsys):
    iris_program.main(tmp_path, 2)
    printed = capsys.readouterr().out
    assert float(re.search(r"Test set accuracy: (\d\.\d+)", printed)[1]) > 0.9
    assert re.findall(r'Prediction is "(\w+)" \(\d+.\d%\), expected "\1"', printed) == iris_program.SPECIES


def build_model_columns():
    age, hours_per_week = (tf.feature_column.numeric_column(name) for name in ("age", "hours_per_week"))
    education = tf.feature_column.categorical_column_with_vocabulary_list("education", EDUCATIONS)
    workclass = tf.feature_column.categorical_column_with_vocabulary_list("workclass", ["Private", "State-gov"])
    occupation = tf.feature_column.categorical_column_with_hash_bucket("occupation", hash_bucket_size=100)
    age_buckets = tf.feature_column.bucketized_column(age, boundaries=[25, 35, 45, 55])
    crossed = [
        tf.feature_column.crossed_column(["education", "occupation"], hash_bucket_size=100),
        tf.feature_column.crossed_column([age_buckets, "education", "occupation"], hash_bucket_size=100),
    ]
    deep = [
        age,
        hours_per_week,
        tf.feature_column.indicator_column(workclass),
        tf.feature_column.indicator_column(education),
        tf.feature_column.embedding_column(occupation, dimension=8),
    ]
    return [education, workclass, occupation, age_buckets, *crossed], deep


def census_file(path, count, seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        age, education, hours = rng.integers(18, 70), rng.choice(EDUCATIONS), rng.integers(10, 60)
        rich = (education != "HS-grad") and age > 40
        words = [age, rng.choice(["Private", "State-gov"]), education, rng.choice(["Sales", "Tech"]), hours]
        rows.append(",".join(map(str, [*words, ">50K" if rich else "<=50K"])))
    path.write_text("\n".join(rows) + "\n")
    return path


def census_input_fn(data_file, num_epochs, shuffle, batch_size):
    def parse_csv(value):
        columns = tf.io.decode_csv(value, record_defaults=CENSUS_DEFAULTS)
        features = dict(zip(CENSUS_COLUMNS, columns, strict=True))
        labels = features.pop("income_bracket")
        return features, tf.equal(labels, ">50K")

    dataset = tf.data.TextLineDataset(str(data_file))
    if shuffle:
        dataset = dataset.shuffle(buffer_size=200)
    return dataset.map(parse_csv, num_parallel_calls=2).repeat(num_epochs).batch(batch_size)


def test_census(tmp_path):
    wide_columns, deep_columns = build_model_columns()
    train_file, test_file = census_file(tmp_path / "train", 200, 1), census_file(tmp_path / "test", 100, 2)
    run_config = tf_estimator.RunConfig(num_gpus=2, tf_random_seed=1).replace(
        session_config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    )
    model = tf_estimator.DNNLinearCombinedClassifier(
        model_dir=str(tmp_path / "model"),
        linear_feature_columns=wide_columns,
        dnn_feature_columns=deep_columns,
        dnn_hidden_units=[10, 5],
        linear_optimizer=tf.compat.v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
        dnn_optimizer=lambda: tf.compat.v1.train.AdagradOptimizer(0.05),
        config=run_config,
    )
    model.train(input_fn=lambda: census_input_fn(train_file, 12, True, 10))
    results = model.evaluate(input_fn=lambda: census_input_fn(test_file, 1, False, 10))
    assert sorted(results) == [
        "accuracy", "accuracy_baseline", "auc", "auc_precision_recall", "average_loss", "global_step", "label/mean",
        "loss", "precision", "prediction/mean", "recall",
    ]  # fmt: skip
    assert results["auc"] > 0.8 and results["global_step"] == 120
    feature_spec = tf.feature_column.make_parse_example_spec(wide_columns + deep_columns)
    example_input_fn = tf_estimator.export.build_parsing_serving_input_receiver_fn(feature_spec)
    exported = model.export_saved_model(str(tmp_path / "export"), example_input_fn)
    assert tf.io.gfile.exists(exported + b"/saved_model.pb")
