"""The axis of a tower's examples, against TensorFlow's own inference of shapes for a batch of unknown size."""

import pytest
import tensorflow as tf

from tower_train.graph.batch_axis import Axis, batch_axis

v1 = tf.compat.v1
BATCH = LENGTH = 6  # of as many steps as examples, so that sizes do not tell
CHANGES = {
    "elementwise": lambda x: tf.nn.relu(x) + tf.ones([5]),
    "time first": lambda x: tf.transpose(x, [1, 0, 2]),
    "added": lambda x: tf.transpose(x, [1, 0, 2]) + x[:, 0],
    "to one row": lambda x: tf.reduce_max(x, 1),
    "to one row, kept": lambda x: tf.reduce_mean(tf.transpose(x, [1, 0, 2]), [0], keepdims=True),
    "dense": lambda x: tf.tensordot(x, tf.ones([5, 4]), 1),
    "dense, time first": lambda x: tf.tensordot(tf.transpose(x, [1, 0, 2]), tf.ones([5, 4]), 1),
    "by einsum": lambda x: tf.einsum("btf,fg->tbg", x, tf.ones([5, 4])),
    "attention": lambda x: tf.matmul(x, x, transpose_b=True),
    "convolution": lambda x: tf.nn.conv1d(x, tf.ones([3, 5, 2]), 1, "SAME"),
    "joined": lambda x: tf.concat([x, x], 1),
    "stacked": lambda x: tf.stack([x, x]),
    "stacked last": lambda x: tf.stack([x, x], -1),
    "one step": lambda x: x[:, 0],
    "one channel": lambda x: x[..., 0],
    "a new axis": lambda x: x[tf.newaxis, :, 1:3],
    "a new axis between": lambda x: tf.expand_dims(x, -1)[:, tf.newaxis, 2],
    "squeezed": lambda x: tf.squeeze(tf.expand_dims(tf.transpose(x, [1, 0, 2]), 0), 0),
    "flat": lambda x: tf.reshape(x, [-1, LENGTH * 5]),
    "with heads": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [LENGTH, -1, 5, 1]),
    "gathered": lambda x: tf.gather(x, [1, 0], axis=2),
    "embedded": lambda x: tf.gather(tf.ones([9, 3]), tf.cast(x[..., 0], tf.int32)),
    "one hot": lambda x: tf.one_hot(tf.cast(tf.transpose(x[..., 0]), tf.int32), 3),
    "of classes": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros_like(x[..., 0], tf.int32), x),
    "the greatest": lambda x: tf.argmax(x, -1),
    "as a diagonal": lambda x: tf.linalg.diag(x),
    "broadcast": lambda x: x[:, 0, 0] + tf.ones([3, 1]),
    "for each of two": lambda x: tf.broadcast_to(x, tf.concat([[2], tf.shape(x)], 0)),
    "unpacked": lambda x: tf.unstack(x, LENGTH, axis=1)[2],
    "a loop over time": lambda x: tf.scan(lambda state, step: state + step, tf.transpose(x, [1, 0, 2])),
    "its last step": lambda x: tf.foldl(lambda state, step: state + step, tf.transpose(x, [1, 0, 2])),
    "a loop over examples": lambda x: tf.map_fn(tf.nn.relu, x),
    "of the weights": lambda x: tf.ones([6, 6]) @ tf.ones([6, 6]),
    "a covariance": lambda x: tf.matmul(x[:, 0], x[:, 0], transpose_a=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_axis_is_that_of_unknown_size(change):
    with tf.Graph().as_default():
        unknown = change(v1.placeholder(tf.float32, [None, LENGTH, 5])).shape.as_list()
        inputs = v1.placeholder(tf.float32, [BATCH, LENGTH, 5])
        found = batch_axis(change(inputs), BATCH, {inputs.name: Axis()})
    assert found == (unknown.index(None) if None in unknown else None)


def test_rows_of_all_examples_and_single_examples():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [4, 6, 5])
        known = {x.name: Axis()}
        assert batch_axis(tf.reshape(x, [24, 5]), 4, known) == 0
        assert batch_axis(tf.reshape(tf.transpose(x, [1, 0, 2]), [24, 5]), 4, known) == 0
        assert batch_axis(tf.reshape(x, [1, 4, 30, 1]), 4, known) == 1  # as Keras 2 normalises layers
        assert batch_axis(x[1], 4, known) is None and batch_axis(x[:2], 4, known) is None
        assert batch_axis(tf.unstack(x)[1], 4, known) is None and batch_axis(tf.gather(x, 1), 4, known) is None


def test_an_embedding_in_a_variable_has_the_axis_of_its_indices():
    with tf.Graph().as_default():
        words = v1.placeholder(tf.int32, [4, 6])
        table = v1.get_variable("table", [9, 5], use_resource=True)
        assert batch_axis(tf.gather(table, words), 4, {words.name: Axis()}) == 0
        assert batch_axis(tf.nn.embedding_lookup(table, tf.transpose(words)), 4, {words.name: Axis()}) == 1


def test_examples_may_be_constants():
    with tf.Graph().as_default():
        x = tf.ones([4, 7, 5])
        assert batch_axis(tf.transpose(x, [1, 0, 2]), 4, {x.name: Axis()}) == 1


def test_what_is_merged_before_the_examples_is_split_again():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [4, 7, 5])
        merged = tf.reshape(tf.transpose(x, [1, 0, 2]), [28, 5])
        assert batch_axis(tf.reshape(merged, [7, 4, 5]), 4, {x.name: Axis()}) == 1
        assert batch_axis(tf.reshape(merged, [4, 7, 5]), 4, {x.name: Axis()}) is None


def test_a_scalar_beside_the_examples_has_no_axis():
    with tf.Graph().as_default():
        x, scalar = v1.placeholder(tf.float32, [4, 5]), v1.placeholder(tf.float32, [])
        known = {x.name: Axis(), scalar.name: Axis()}
        assert batch_axis(tf.exp(scalar), 4, known) is None
        assert batch_axis(tf.one_hot(tf.cast(scalar, tf.int32), 4) + tf.ones([4]), 4, known) is None
        assert batch_axis(x * tf.exp(scalar), 4, known) == 0


def test_rows_that_each_example_chooses_by_drawn_numbers():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [4, 6, 5])
        drawn = tf.random.stateless_uniform([4, 2], [1, 2], 0, 6, tf.int32)
        assert batch_axis(tf.gather(x, drawn, batch_dims=1), 4, {x.name: Axis()}) == 0
        assert batch_axis(tf.gather(x, tf.reduce_sum(drawn), axis=1), 4, {x.name: Axis()}) == 0


def test_a_deep_network_and_a_loop_of_tensorflow_1_are_followed():
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [4, 5])
        for _ in range(1200):
            y = y + 1
        assert batch_axis(y, 4, {x.name: Axis()}) == 0
        v1.disable_control_flow_v2()
        try:
            _, z = v1.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * x), [0, x])
        finally:
            v1.enable_control_flow_v2()
        assert batch_axis(z, 4, {x.name: Axis()}) == 0
