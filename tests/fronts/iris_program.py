"""The iris program of TensorFlow's guide for 1.x: python iris_program.py MODEL_DIR GPUS. The flowers are made up."""

import sys

import numpy as np
import tensorflow as tf

from tower_train import estimator as tf_estimator

FEATURES = ["SepalLength", "SepalWidth", "PetalLength", "PetalWidth"]
SPECIES = ["Setosa", "Versicolor", "Virginica"]


def flowers(count, seed):
    rng = np.random.default_rng(seed)
    species = rng.integers(0, 3, count)
    sizes = 3 + np.outer(species, [1, 0.2, 2, 1]) + 0.3 * rng.normal(size=[count, 4])
    return dict(zip(FEATURES, sizes.T, strict=True)), species


def train_input_fn(features, labels, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((dict(features), labels))
    return dataset.shuffle(1000).repeat().batch(batch_size)


def eval_input_fn(features, labels, batch_size):
    inputs = dict(features) if labels is None else (dict(features), labels)
    return tf.data.Dataset.from_tensor_slices(inputs).batch(batch_size)


def main(model_dir, gpus):
    (train_x, train_y), (test_x, test_y) = flowers(120, 1), flowers(30, 2)
    my_feature_columns = []
    for key in train_x.keys():
        my_feature_columns.append(tf.feature_column.numeric_column(key=key))
    classifier = tf_estimator.DNNClassifier(
        feature_columns=my_feature_columns,
        hidden_units=[10, 10],
        n_classes=3,
        model_dir=model_dir,
        config=tf_estimator.RunConfig(num_gpus=int(gpus), tf_random_seed=1),
    )
    classifier.train(input_fn=lambda: train_input_fn(train_x, train_y, 100), steps=400)
    eval_result = classifier.evaluate(input_fn=lambda: eval_input_fn(test_x, test_y, 100))
    print("\nTest set accuracy: {accuracy:0.3f}\n".format(**eval_result))
    expected = ["Setosa", "Versicolor", "Virginica"]
    predict_x = dict(zip(FEATURES, (3 + np.outer(range(3), [1, 0.2, 2, 1])).T, strict=True))
    predictions = classifier.predict(input_fn=lambda: eval_input_fn(predict_x, None, 100))
    for pred_dict, expec in zip(predictions, expected, strict=True):
        class_id = pred_dict["class_ids"][0]
        probability = pred_dict["probabilities"][class_id]
        print(f'Prediction is "{SPECIES[class_id]}" ({100 * probability:.1f}%), expected "{expec}"')


if __name__ == "__main__":
    main(*sys.argv[1:])
