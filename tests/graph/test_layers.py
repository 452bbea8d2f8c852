"""layers.frozen and layers.gradient_until: what is not trained stays as it is and costs nothing.
layers.progressive_resize: images of the size of the epoch."""

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

import tower_train
from tower_train import errors, layers
from tower_train.graph import context
from tower_train.workload import DataRequest

v1 = tf.compat.v1


def network(features, training):
    with layers.frozen():
        normal = layers.batch_normalization(features, training, name="norm")
        hidden = tf.nn.relu(toy_workload.layer("hidden", normal, 8))
    return toy_workload.layer("softmax_linear", hidden, 3)


WORKLOAD = tower_train.Workload("frozen", toy_workload.load, network)
FROZEN = {f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")} | {
    "hidden/weights",
    "hidden/biases",
}
TRAINED = {"softmax_linear/weights", "softmax_linear/biases"}
OPTIONS = dict(num_gpus=2, batch_size=4, optimizer="momentum", learning_rate=0.1, dtype="float64", ema=0.9)


def test_frozen_variables_stay_and_have_no_slots_gradient_nor_decay():
    with trainings.opened(WORKLOAD, toy_workload.load(DataRequest("train")), **OPTIONS) as (built, session):
        variables = {variable.op.name: variable for variable in built.saved.variables}
        start, _, ended = (session.run(fetch) for fetch in (variables, built.report, variables))
    slots = {f"{name}/{slot}" for name in TRAINED for slot in ("Momentum", "ExponentialMovingAverage")}
    assert variables.keys() == FROZEN | TRAINED | slots | {"global_step", "examples_seen"}
    for name in FROZEN | TRAINED:
        assert np.array_equal(ended[name], start[name]) == (name in FROZEN), name
    assert {name.rpartition(" of ")[2] for name in built.checked[1:]} == TRAINED
    needed = v1.graph_util.extract_sub_graph(built.graph.as_graph_def(), [built.train_op.name]).node
    gradients = [node.op for node in needed if "/gradients/" in node.name]
    assert gradients.count("MatMul") == 2, "that of the last weights, in either tower"
    assert "ReluGrad" not in gradients
    [decay] = built.graph.get_collection(v1.GraphKeys.REGULARIZATION_LOSSES)
    assert decay.op.name.startswith("softmax_linear/")


@pytest.mark.parametrize("epochs_seen, is_early", [(1.99, True), (2.0, False)])
def test_early_weights_have_a_gradient_until_then(epochs_seen, is_early):
    computed = []

    @tf.custom_gradient
    def noted(x):
        def gradient(upstream):
            def note(value):
                computed.append(len(value))
                return value

            return tf.ensure_shape(tf.numpy_function(note, [upstream], upstream.dtype), upstream.shape)

        return tf.identity(x), gradient

    x, w, upstream = np.array([1.0, -2.0, 3.0]), np.array([0.5, 2.0, -1.0]), np.array([1.0, 10.0, 100.0])
    with tf.Graph().as_default(), v1.Session() as session:
        early, late = tf.constant(x), tf.constant(w)
        with context.entered(context.Context(epochs_seen=tf.constant(epochs_seen, tf.float64))):
            outputs = layers.gradient_until(2, lambda e, w: tf.square(noted(e)) * w, early, late)
        found = session.run([outputs, *tf.gradients(outputs, [early, late], tf.constant(upstream))])
    np.testing.assert_allclose(found[0], x**2 * w)
    np.testing.assert_allclose(found[1], 2 * x * w * upstream * is_early)
    np.testing.assert_allclose(found[2], x**2 * upstream)
    assert len(computed) == is_early


@pytest.mark.parametrize("epochs_seen, size", [(0.99, 20), (1.0, 13), (7.0, 32)])
def test_images_have_the_size_of_the_epoch(epochs_seen, size):
    images = np.random.default_rng(0).normal(size=[2, 16, 24, 3]).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        seen = v1.placeholder_with_default(tf.constant(epochs_seen, tf.float64), [])
        with context.entered(context.Context(epochs_seen=seen)):
            resized = layers.progressive_resize(tf.constant(images), {2.5: 32, 0: 20, 1: 13})
        expected = tf.image.resize(images, [size, size], antialias=True)
        assert resized.shape.as_list() == [2, None, None, 3]
        np.testing.assert_allclose(*session.run([resized, expected]), rtol=0, atol=1e-5)


def test_images_keep_their_size_outside_of_training():
    images = tf.zeros([2, 16, 24, 3])
    assert layers.progressive_resize(images, {0: 8}) is images
    for sizes in ({1: 24}, {0: 24, 3: 0}, {}):
        with pytest.raises(errors.GraphError, match=r"sizes=.*from epoch 0"):
            layers.progressive_resize(images, sizes)


def test_towers_change_the_size_together():
    """Ten examples are an epoch, which ends within the third step, on the second of its towers."""

    def network(images, training):
        resized = layers.progressive_resize(images, {0: 5, 1: 8})
        kernels = v1.get_variable("kernels", [3, 3, 3, 4], images.dtype)
        features = tf.reduce_max(tf.nn.relu(tf.nn.conv2d(resized, kernels, 1, "SAME")), [1, 2])
        return toy_workload.layer("softmax_linear", features, 3)

    rng = np.random.default_rng(0)
    examples = tower_train.Examples.from_arrays("images", rng.normal(size=[10, 8, 8, 3]), rng.integers(3, size=10))
    workload = tower_train.Workload("resized", lambda request: examples, network)
    options = dict(global_batch_size=4, optimizer="momentum", learning_rate=0.1, dtype="float64")
    one, two = (trainings.train(workload, examples, 6, num_gpus=count, **options) for count in (1, 2))
    trainings.assert_same(two, one)
