"""Towers of one CPU that are computed together: what each tower would compute by itself, as TensorFlow computes it."""

import jobs
import norm_workload
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import Examples
from tower_train.graph import postponed
from tower_train.workload import DataRequest

v1 = tf.compat.v1
TOWERS = 3
MATRIX = np.random.default_rng(1).normal(size=(4, 4))


def dense(x, w):
    return tf.nn.relu(tf.nn.bias_add(tf.reshape(x, [-1, 64])[:, :5] @ w, w[0]))


def convolutions(x, w):
    maps = tf.nn.conv2d(x, tf.reshape(w, [1, 1, 5, 6])[:, :, :4], strides=1, padding="SAME")
    pooled = tf.nn.max_pool2d(tf.nn.bias_add(maps, w[0]), 2, 2, "SAME")
    padded = tf.pad(tf.tanh(pooled), [[0, 0], [1, 0], [0, 1], [0, 0]])
    return tf.nn.conv2d(padded, tf.reshape(w, [1, 5, 6, 1]), strides=2, padding="SAME")


def pixels_first(x, w):
    """Transforms along the pixels, the batch in the middle, as those of cifar10.convolution."""
    maps = tf.transpose(x, [1, 2, 0, 3])
    batch = maps.shape[2]
    rows = tf.constant(MATRIX) @ tf.reshape(maps, [4, -1])
    ends, inner = tf.split(rows, [1, 3])
    inner = tf.matmul(tf.constant(MATRIX), tf.reshape(inner, [3, 4, -1]))
    products = tf.matmul(tf.reshape(inner, [12, batch, 4]), tf.reshape(w[:4], [1, 4, 6]))
    ends = tf.matmul(tf.reshape(ends, [4, batch, 4]), w[:4] + tf.zeros([4, 1, 1], tf.float64))
    both = tf.reshape(tf.concat([ends, products], axis=0), [4, 4, batch, 6])
    return tf.reduce_sum(tf.transpose(both, [2, 0, 1, 3]), axis=[1, 2])


def attention(x, w):
    """Products whose factors both hold the batch, among the axes before theirs."""
    rows = tf.reshape(x, [-1, 16, 4]) @ w[:4]
    return tf.nn.log_softmax(tf.matmul(rows, rows, transpose_b=True)) @ tf.reshape(x, [-1, 16, 4])


def over_the_batch(x, w):
    """A mean over the tower's own batch, which no other tower's may enter."""
    return (x - tf.reduce_mean(x, axis=0)) @ w[:4] / tf.math.reduce_std(x @ w[:4], axis=0)


def with_nothing(x, w):
    return tf.reduce_sum(tf.reshape(x[:, :0], [0, 16])) + x @ w[:4]


def in_branches(x, w):
    products = x @ w[:4]
    return tf.cond(tf.reduce_all(products < 100), lambda: tf.square(products), lambda: products)


def losses_and_gradients(network, batch):
    """Over towers (given, loss, gradient for the weights and for the input) in a graph; and the weights."""
    w = v1.get_variable("w", [5, 6], tf.float64)
    towers = []
    for i, x in enumerate(np.random.default_rng(0).normal(size=(TOWERS, batch, 4, 4, 4))):
        with tf.name_scope(f"tower_{i}/"):
            x = v1.placeholder_with_default(x, x.shape)
            loss = tf.reduce_mean(tf.square(network(x, w)) + 1)
            towers.append((x, loss, *v1.gradients(loss, [w, x])))
    return towers, w


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "network, is_joined",
    [
        (dense, True),
        (convolutions, True),
        (pixels_first, True),
        (attention, True),
        (over_the_batch, False),
        (with_nothing, True),
        (in_branches, False),
    ],
)
def test_each_tower_has_what_tensorflow_computes_for_it_alone(network, is_joined, batch):
    with tf.Graph().as_default() as graph, v1.Session() as session:
        towers, w = losses_and_gradients(network, batch)
        xs, losses, grads, x_grads = zip(*towers, strict=True)
        others = list(zip(losses, x_grads, strict=True))
        found = postponed.together([[(grad, w)] for grad in grads], others, [[x] for x in xs])
        mean, each = found.tower_grads[0][0][0].mean(), [row[0][0].tensor() for row in found.tower_grads]
        session.run(w.initializer)
        values, right = session.run([(mean, each, found.others), (tf.add_n(grads) / TOWERS, list(grads), others)])
        for value, expected in zip(*map(tf.nest.flatten, (values, right)), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
        needed = v1.graph_util.extract_sub_graph(graph.as_graph_def(), [mean.op.name]).node
        of_the_last = [node.op for node in needed if node.name.startswith("tower_2/")]
        assert set(of_the_last) <= {"PlaceholderWithDefault", "Const"}, "its own operations"
        kinds = [node.op for node in needed if node.name.startswith("joined/")]
        squares = kinds.count("Square") + kinds.count("StatelessIf")
        assert squares == 0 if is_joined else squares > 0  # what is made for each tower by itself is not made once


def test_a_network_with_an_effect_is_computed_tower_by_tower():
    def checked(x, w):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 9), ["too great"])]):
            return tf.identity(x) @ w[:4]

    with tf.Graph().as_default(), v1.Session() as session:
        towers, w = losses_and_gradients(checked, 2)
        xs, losses, grads, _ = zip(*towers, strict=True)
        found = postponed.together([[(g, w)] for g in grads], [[loss] for loss in losses], [[x] for x in xs])
        mean = found.tower_grads[0][0][0].mean()
        session.run(w.initializer)
        np.testing.assert_allclose(*session.run([mean, tf.add_n(grads) / TOWERS]), rtol=1e-12)
        with pytest.raises(tf.errors.InvalidArgumentError, match="too great"):
            session.run(mean, {xs[1]: np.full([2, 4, 4, 4], 10.0)})


@pytest.mark.parametrize("options", [{}, {"sync_batch_norm": True}, {"accumulate_steps": 2}])
def test_joined_towers_train_what_towers_apart_do(options):
    """With batch normalisation, dropout, a sparse gradient and weight decay."""
    examples = norm_workload.load(DataRequest("train"))
    common = dict(dtype="float64", num_gpus=3, batch_size=4, optimizer="momentum") | options
    joined, apart = (
        trainings.train(norm_workload.WORKLOAD, examples, 3, join_towers=join, **common) for join in (True, False)
    )
    trainings.assert_same(joined, apart)


def test_a_tower_s_own_tensors_are_those_before_the_update():
    examples = toy_workload.load(DataRequest("train"))
    values = []
    for join in (True, False):
        with trainings.opened(
            toy_workload.WORKLOAD,
            examples,
            dtype="float64",
            num_gpus=3,
            batch_size=4,
            learning_rate=1.0,
            join_towers=join,
        ) as (built, session):
            means = [op for op in built.graph.get_operations() if op.name.startswith("tower_2/") and op.type == "Mean"]
            values.append([session.run([built.report, means[0].outputs[0]])[1] for _ in range(3)])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)
    assert len(set(values[0])) == 3


def test_the_tower_of_a_bad_example_is_told():
    rng = np.random.default_rng(0)
    features = rng.normal(size=[12, 4]).astype(np.float32)
    features[5, 1] = np.nan
    examples = Examples.from_arrays("bad", features, np.arange(12) % 3, toy_workload.CLASSES)
    found = []
    for join in (True, False):
        with trainings.opened(toy_workload.WORKLOAD, examples, num_gpus=3, batch_size=4, join_towers=join) as (
            built,
            session,
        ):
            found.append(session.run(built.report).finite)
    np.testing.assert_array_equal(*found)
    assert found[0][:3].all(axis=1).sum() == 2 and not found[0][3].all()


def test_the_operations_of_a_step_do_not_grow_with_the_towers():
    def count(towers):
        with trainings.opened(
            toy_workload.WORKLOAD,
            toy_workload.load(DataRequest("train")),
            num_gpus=towers,
            batch_size=2,
            join_towers=True,
        ) as (built, _):
            definition = v1.graph_util.extract_sub_graph(built.graph.as_graph_def(), [built.train_op.name])
            return [node.op for node in definition.node]

    few, many = count(2), count(8)
    for op in ("MatMul", "Relu", "ReluGrad", "SparseSoftmaxCrossEntropyWithLogits"):
        assert few.count(op) == many.count(op) > 0, op


def test_runs_go_on_joined_or_apart(tmp_path):
    common = dict(dtype="float64", num_gpus=2, save_every_steps=0)
    jobs.train_toy(tmp_path / "changed", max_steps=4, join_towers=True, **common)
    jobs.train_toy(tmp_path / "changed", max_steps=8, join_towers=False, **common)
    jobs.train_toy(tmp_path / "whole", max_steps=8, join_towers=True, **common)
    changed, whole = (
        tf.train.load_checkpoint(tf.train.latest_checkpoint(tmp_path / name)) for name in ("changed", "whole")
    )
    for name in whole.get_variable_to_shape_map():
        if whole.get_variable_to_dtype_map()[name].is_floating:
            np.testing.assert_allclose(changed.get_tensor(name), whole.get_tensor(name), rtol=1e-9, err_msg=name)
