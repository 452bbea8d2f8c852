"""A dataset of the user's own as Examples, and its order in the stream."""

import dataclasses

import element_workloads
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
from trainings import on_host, stream_batches

from tower_train import errors
from tower_train.data import tf_data
from tower_train.graph.draws import Draws
from tower_train.graph.order import AllExamples
from tower_train.workload import DataRequest

v1 = tf.compat.v1


def pairs(count):
    return tf.data.Dataset.range(count).map(lambda i: (tf.cast(i, tf.float32), i))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: [1, 2], {}, "elements returned a list of 1 .* Let it return a tf.data.Dataset of"),
        (lambda: tf.data.Dataset.range(3), {}, "elements returned .* of .features, label., not of these"),
        (lambda: pairs(3).repeat(), {}, "it repeats, so say how many examples make an epoch with num_examples="),
        (lambda: pairs(3).filter(lambda x, y: True), {}, "TensorFlow cannot count this dataset"),
        (lambda: tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3]]), [0, 1])), {}, "a ragged"),
        (lambda: tf.data.Dataset.from_tensor_slices((tf.sparse.eye(3), [0, 1, 2])), {}, "a sparse tensor, float32 "),
    ],
)
def test_what_cannot_be_is_one_line(make, options, text):
    with pytest.raises(errors.UserError, match=f"^mine: .*{text}"):
        tf_data.examples("mine", make, **options)


def batches(workload, examples, steps, *layout, **of_workers):
    return stream_batches(workload, examples, steps, on_host(*layout, **of_workers), seed=3)


def test_towers_share_the_elements_in_their_order_with_the_noise_of_their_positions():
    features, labels = element_workloads.arrays("train")
    workload, request = element_workloads.IN_ORDER, DataRequest("train")
    steps = batches(workload, workload.examples(request), 8, 5, 3)
    taken = np.arange(8 * 15) % 96
    np.testing.assert_array_equal(np.concatenate([labels for step in steps for _, labels in step]), labels[taken])
    with tf.Graph().as_default(), v1.Session() as session:
        draws = Draws(3, tf.constant(0, tf.int64), 8 * 15, locate=AllExamples(workload.examples(request), 3).locate)
        expected = session.run(toy_workload.add_noise(tf.constant(features[taken]), draws))
    np.testing.assert_array_equal(np.concatenate([features for step in steps for features, _ in step]), expected)


def test_several_features_and_a_symbolic_batch():
    examples = tf_data.examples("mine", lambda: pairs(7).map(lambda x, y: ({"a": x, "b": [x, x]}, y)), class_names="ab")
    assert (examples.name, examples.num_examples, examples.class_names) == ("mine", 7, ("a", "b"))
    with tf.Graph().as_default():
        features, label = examples.symbolic_batch()
    assert (features["a"].shape, features["b"].shape, label.shape) == ([1], [1, 2], [1])
    workload = dataclasses.replace(toy_workload.WORKLOAD, augment=None, prepare=lambda f: f | {"c": f["a"] * 2})
    [[(features, _)]] = batches(workload, examples, 1, 3)
    np.testing.assert_array_equal(features["c"], [0, 2, 4])
