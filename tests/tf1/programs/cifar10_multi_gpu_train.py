"""A loop over towers by hand."""

import time
from datetime import datetime

import numpy as np
import tensorflow as tf
from six.moves import xrange

import cifar10

FLAGS = tf.app.flags.FLAGS
tf.app.flags.DEFINE_string("train_dir", "/tmp/cifar10_train", "Where to write checkpoints.")
tf.app.flags.DEFINE_integer("max_steps", 1000000, "Number of batches to run.")
tf.app.flags.DEFINE_integer("num_gpus", 1, "How many GPUs to use.")


def tower_loss(scope):
    images, labels = cifar10.distorted_inputs()
    cifar10.loss(cifar10.inference(images), labels)
    losses = tf.get_collection("losses", scope)
    return tf.add_n(losses, name="total_loss")


def average_gradients(tower_grads):
    average_grads = []
    for grad_and_vars in zip(*tower_grads):
        grads = [tf.expand_dims(g, 0) for g, _ in grad_and_vars]
        grad = tf.reduce_mean(tf.concat(axis=0, values=grads), 0)
        average_grads.append((grad, grad_and_vars[0][1]))
    return average_grads


def train():
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        global_step = tf.get_variable("global_step", [], initializer=tf.constant_initializer(0), trainable=False)
        decay_steps = int(cifar10.NUM_EXAMPLES_PER_EPOCH / FLAGS.batch_size * cifar10.NUM_EPOCHS_PER_DECAY)
        lr = tf.train.exponential_decay(0.1, global_step, decay_steps, 0.1, staircase=True)
        opt = tf.train.GradientDescentOptimizer(lr)
        tower_grads = []
        with tf.variable_scope(tf.get_variable_scope()):
            for i in xrange(FLAGS.num_gpus):
                with tf.device("/gpu:%d" % i):
                    with tf.name_scope("%s_%d" % (cifar10.TOWER_NAME, i)) as scope:
                        loss = tower_loss(scope)
                        tf.get_variable_scope().reuse_variables()
                        summaries = tf.get_collection(tf.GraphKeys.SUMMARIES, scope)
                        tower_grads.append(opt.compute_gradients(loss))
        apply_gradient_op = opt.apply_gradients(average_gradients(tower_grads), global_step=global_step)
        variable_averages = tf.train.ExponentialMovingAverage(0.9999, global_step)
        train_op = tf.group(apply_gradient_op, variable_averages.apply(tf.trainable_variables()))
        saver = tf.train.Saver(tf.global_variables())
        summary_op = tf.summary.merge(summaries)
        sess = tf.Session(config=tf.ConfigProto(allow_soft_placement=True))
        sess.run(tf.global_variables_initializer())
        tf.train.start_queue_runners(sess=sess)
        summary_writer = tf.summary.FileWriter(FLAGS.train_dir, sess.graph)
        for step in xrange(FLAGS.max_steps):
            start_time = time.time()
            _, loss_value = sess.run([train_op, loss])
            duration = time.time() - start_time
            assert not np.isnan(loss_value), "Model diverged with loss = NaN"
            if step % 10 == 0:
                per_sec, per_batch = FLAGS.batch_size * FLAGS.num_gpus / duration, duration / FLAGS.num_gpus
                line = "%s: step %d, loss = %.2f (%.1f examples/sec; %.3f sec/batch)"
                print(line % (datetime.now(), step, loss_value, per_sec, per_batch))
                summary_writer.add_summary(sess.run(summary_op), step)
        saver.save(sess, FLAGS.train_dir + "/model.ckpt", global_step=FLAGS.max_steps)


def main(argv=None):
    if tf.gfile.Exists(FLAGS.train_dir):
        tf.gfile.DeleteRecursively(FLAGS.train_dir)
    tf.gfile.MakeDirs(FLAGS.train_dir)
    train()


if __name__ == "__main__":
    tf.app.run()
