"""Towers that share cores compute some things once for all of them, which changes nothing."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

import cifar10
from tower_train import layers
from tower_train.graph import postponed
from tower_train.workload import DataRequest, Workload

v1 = tf.compat.v1
BATCH, TOWERS = 4, 3
ROTATION = np.random.default_rng(1).normal(size=(6, 5))


def product(x, w):
    return x @ w


def transformed(x, w):
    """Weights that come in two parts, one of them turned over, behind a constant matrix."""
    first, rest = tf.split(tf.constant(ROTATION) @ w, [2, 4])
    turned = tf.transpose(tf.reshape(rest, [2, 2, 6]), [1, 0, 2])
    return tf.concat([x[:, :2] @ first, x[:, :4] @ tf.reshape(turned, [4, 6])], axis=1)


def batched(x, w):
    """The same weights for two groups of channels."""
    groups = tf.reshape(tf.transpose(x[:, :4]), [2, 2, BATCH])
    return tf.matmul(groups, tf.reshape(w[:4], [2, 2, 6]), transpose_a=True)


def bent(x, w):
    return x @ tf.tanh(w)


def between(x, w):
    """Both factors of the gradient's product depend on the tower, and one on the weights."""
    return tf.tanh(x @ w) @ tf.transpose(w)


@pytest.mark.parametrize("network", [product, transformed, batched, bent, between])
def test_the_sum_and_each_tower_s_gradient_are_those_of_tensorflow(network):
    with tf.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", [5, 6], tf.float64)
        draws = np.random.default_rng(0).normal(size=(TOWERS, BATCH, 5))
        losses = [tf.reduce_mean(tf.square(network(v1.placeholder_with_default(x, x.shape), w))) for x in draws]
        grads = [tf.gradients(loss, w) for loss in losses]
        expected, of_all = [grad for [grad] in grads], tf.gradients(tf.add_n(losses), w)[0]
        rows = postponed.not_joined([[(grad, w)] for [grad] in grads], [], TOWERS).tower_grads
        found = [row[0][0] for row in rows]
        assert all(row[0][1] is w for row in rows)
        session.run(w.initializer)
        for value, right in zip(*session.run([[one.tensor() for one in found], expected]), strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-12, atol=1e-12)
        value, right = session.run([found[0].mean(), of_all / TOWERS])
        np.testing.assert_allclose(value, right, rtol=1e-12, atol=1e-12)


def executed(graph, train_op):
    """The operations that a step runs, but those in branches."""
    names = {node.name for node in v1.graph_util.extract_sub_graph(graph.as_graph_def(), [train_op.name]).node}
    return [op for op in graph.get_operations() if op.name in names]


def test_the_large_tensors_of_weights_do_not_grow_with_the_towers(cifar10_dir, open_training):
    """Gradients of local3's weights, and conv2's spectrum and its gradients, each of which has megabytes."""
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))

    def count(towers):
        with open_training(cifar10.WORKLOAD, examples, num_gpus=towers, batch_size=8 // towers, join_towers=True) as (
            built,
            _,
        ):
            made = [op for op in executed(built.graph, built.train_op) if op.type != "ReadVariableOp"]
            sizes = [output.shape.num_elements() for op in made for output in op.outputs]
            return sizes.count(2304 * 384), sizes.count(252 * 64 * 64)

    two, four = count(2), count(4)
    assert two == four and min(two) > 0


def counting(calls):
    """A network of one layer that squares its weights `once`, noting it."""

    def square(weights):
        calls.append(weights)
        return tf.square(weights)

    def network(features, training):
        weights = v1.get_variable("weights", [4, 3], features.dtype)
        return features @ layers.once("square", square, weights)

    return dataclasses.replace(toy_workload.WORKLOAD, inference=network)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        (dict(num_gpus=1), 1),
        (dict(num_gpus=3), 3),
        (dict(num_gpus=3, join_towers=True), 1),
        (dict(num_gpus=3, variable_update="mirrored", all_reduce="add_n"), 3),
        (dict(num_gpus=1, accumulate_steps=3), 3),
    ],
)
def test_towers_that_share_variables_and_cores_transform_weights_once(options, times):
    calls = []
    with trainings.opened(counting(calls), toy_workload.load(DataRequest("train")), batch_size=4, **options):
        assert len(calls) == times


def test_what_is_transformed_once_trains_as_one_tower_does():
    examples = toy_workload.load(DataRequest("train"))
    one, three = (
        trainings.train(
            counting([]), examples, 3, dtype="float64", num_gpus=towers, batch_size=12 // towers, join_towers=True
        )
        for towers in (1, 3)
    )
    trainings.assert_same(three, one)


def test_examples_are_distorted_for_all_towers_at_once():
    sizes = []

    def distort(features, draws):
        sizes.append(features.shape[0])
        return toy_workload.add_noise(features, draws)

    workload: Workload = dataclasses.replace(toy_workload.WORKLOAD, distort=distort)
    with trainings.opened(workload, toy_workload.load(DataRequest("train")), num_gpus=3, batch_size=4):
        assert set(sizes) == {12}
