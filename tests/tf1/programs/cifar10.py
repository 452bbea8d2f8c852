"""The network of a loop over towers, with flags of its own."""

import tensorflow as tf

import cifar10_input

FLAGS = tf.app.flags.FLAGS
tf.app.flags.DEFINE_integer("batch_size", 128, "Images in a batch.")
tf.app.flags.DEFINE_string("data_dir", "/tmp/cifar10_data", "Where the binary files are.")
TOWER_NAME = "tower"
NUM_EXAMPLES_PER_EPOCH, NUM_EPOCHS_PER_DECAY, INITIAL_LEARNING_RATE = 50000, 350.0, 0.1


def _variable(name, shape, stddev, wd):
    with tf.device("/cpu:0"):
        var = tf.get_variable(name, shape, initializer=tf.truncated_normal_initializer(stddev=stddev))
    if wd is not None:
        tf.add_to_collection("losses", tf.multiply(tf.nn.l2_loss(var), wd, name="weight_loss"))
    return var


def distorted_inputs():
    return cifar10_input.distorted_inputs(FLAGS.data_dir, FLAGS.batch_size)


def inference(images):
    with tf.variable_scope("conv1") as scope:
        kernel = _variable("weights", [5, 5, 3, 8], 5e-2, None)
        conv = tf.nn.conv2d(images, kernel, [1, 1, 1, 1], padding="SAME")
        conv1 = tf.nn.relu(conv, name=scope.name)
    pool1 = tf.nn.max_pool(conv1, ksize=[1, 3, 3, 1], strides=[1, 2, 2, 1], padding="SAME", name="pool1")
    with tf.variable_scope("softmax_linear"):
        flat = tf.reshape(pool1, [FLAGS.batch_size, -1])
        weights = _variable("weights", [flat.get_shape()[1].value, 10], 1 / 192.0, 0.004)
        biases = tf.get_variable("biases", [10], initializer=tf.constant_initializer(0.0))
        return tf.add(tf.matmul(flat, weights), biases)


def loss(logits, labels):
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    tf.add_to_collection("losses", tf.reduce_mean(cross_entropy, name="cross_entropy"))
    return tf.add_n(tf.get_collection("losses"), name="total_loss")
