"""The published cifar10_multi_gpu_train, ported to today's TensorFlow and otherwise left as it was: the baseline.

Written afresh after the published scripts. Its slow parts stay, as for a user who ports the script line by line: a
reader and queues that handle one example at a time, `tf.nn.lrn`, the weight decay in every tower, gradients averaged by
concat and reduce_mean. Two defects that would spoil a comparison are mended: the loss is the mean over towers and is
checked for NaN in all of them, and the moving averages follow the update.
"""

import math
import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from cifar10 import records, source
from tower_train import config, workload
from tower_train.graph import devices

v1 = tf.compat.v1

CROP_SIZE = 24
NUM_CLASSES = 10
WEIGHT_DECAY = 0.004
INITIAL_LEARNING_RATE, DECAY_FACTOR, EPOCHS_PER_DECAY = 0.1, 0.1, 350
MOVING_AVERAGE_DECAY = 0.9999
QUEUE_FRACTION = 0.4  # of the examples, in the shuffling queue before the first step
READER_THREADS = 16
LOG_EVERY_STEPS = 10


def train(
    request: workload.DataRequest, batch_size: int, after_step: Callable[[float], bool], num_towers: int = 1
) -> None:
    """Trains as `Side.train`; tower i lives on GPU i, or without GPUs on logical CPU device i."""
    folder, _ = source.locate(request)
    files = [str(folder / name) for name in records.FILES["train"]]
    num_examples = sum(pathlib.Path(file).stat().st_size for file in files) // records.RECORD_BYTES
    placed = devices.place(config.DeviceOptions(num_gpus=num_towers))
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        train_op, loss = build(files, num_examples, batch_size // num_towers, placed.towers)
        coordinator = v1.train.Coordinator()
        with v1.Session(config=placed.session_config) as session:
            session.run(v1.global_variables_initializer())
            threads = v1.train.start_queue_runners(session, coordinator)
            step = 0
            while not coordinator.should_stop():
                _, value = session.run([train_op, loss])
                if math.isnan(value):
                    raise FloatingPointError(f"the loss is NaN at step {step}")
                if step % LOG_EVERY_STEPS == 0:
                    print(f"step {step}, loss = {value:.2f}")
                step += 1
                if after_step(float(value)):
                    coordinator.request_stop()
            coordinator.join(threads)


def build(
    files: list[str], num_examples: int, tower_batch: int, places: Sequence[str]
) -> tuple[tf.Operation, tf.Tensor]:
    """Builds towers and their update in the default graph; returns the op of a step, and the towers' mean loss."""
    global_step = v1.get_variable("global_step", [], tf.int64, v1.zeros_initializer(), trainable=False)
    decay_steps = int(num_examples / tower_batch * EPOCHS_PER_DECAY)
    learning_rate = v1.train.exponential_decay(
        INITIAL_LEARNING_RATE, global_step, decay_steps, DECAY_FACTOR, staircase=True
    )
    optimizer = v1.train.GradientDescentOptimizer(learning_rate)
    tower_grads, losses = [], []
    with v1.variable_scope(v1.get_variable_scope()):
        for i, device in enumerate(places):
            with tf.device(device), v1.name_scope(f"tower_{i}") as scope:
                images, labels = distorted_inputs(files, num_examples, tower_batch)
                losses.append(tower_loss(scope, images, labels))
                v1.get_variable_scope().reuse_variables()
                tower_grads.append(optimizer.compute_gradients(losses[-1]))
    applied = optimizer.apply_gradients(average_gradients(tower_grads), global_step=global_step)
    averages = tf.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
    with tf.control_dependencies([applied]):
        return averages.apply(v1.trainable_variables()), tf.reduce_mean(tf.stack(losses))


def distorted_inputs(files: list[str], num_examples: int, batch: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads, augments and shuffles one example at a time: float32 images [batch, 24, 24, 3], int32 labels [batch]."""
    with tf.device("/cpu:0"):
        queue = v1.train.string_input_producer(files)
        _, value = v1.FixedLengthRecordReader(record_bytes=records.RECORD_BYTES).read(queue)
        record = v1.decode_raw(value, tf.uint8)
        label = tf.cast(record[0], tf.int32)
        planes = tf.reshape(record[1:], [records.CHANNELS, records.IMAGE_SIZE, records.IMAGE_SIZE])
        image = tf.cast(tf.transpose(planes, [1, 2, 0]), tf.float32)
        image = v1.random_crop(image, [CROP_SIZE, CROP_SIZE, records.CHANNELS])
        image = tf.image.random_flip_left_right(image)
        image = tf.image.random_brightness(image, max_delta=63)
        image = tf.image.random_contrast(image, lower=0.2, upper=1.8)
        image = tf.image.per_image_standardization(image)
        least = int(num_examples * QUEUE_FRACTION)
        return v1.train.shuffle_batch(
            [image, label], batch, capacity=least + 3 * batch, min_after_dequeue=least, num_threads=READER_THREADS
        )


def tower_loss(scope: str, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns one tower's cross-entropy plus the weight decay, scalar; scope is the tower's name scope."""
    logits = inference(images)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    v1.add_to_collection("losses", tf.reduce_mean(entropy))
    return tf.add_n(v1.get_collection("losses", scope))


def inference(images: tf.Tensor) -> tf.Tensor:
    """Returns logits [batch, 10] of float32 images [batch, 24, 24, 3]."""
    conv1 = _convolution("conv1", images, 64, bias=0.0)
    pool1 = tf.nn.max_pool2d(conv1, 3, 2, "SAME")
    norm1 = tf.nn.lrn(pool1, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    conv2 = _convolution("conv2", norm1, 64, bias=0.1)
    norm2 = tf.nn.lrn(conv2, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    pool2 = tf.nn.max_pool2d(norm2, 3, 2, "SAME")
    flat = tf.reshape(pool2, [pool2.shape[0], -1])
    local3 = tf.nn.relu(_affine("local3", flat, 384, stddev=0.04, bias=0.1, decay=WEIGHT_DECAY))
    local4 = tf.nn.relu(_affine("local4", local3, 192, stddev=0.04, bias=0.1, decay=WEIGHT_DECAY))
    return _affine("softmax_linear", local4, NUM_CLASSES, stddev=1 / 192, bias=0.0, decay=None)


def average_gradients(tower_grads: list) -> list:
    """Returns the mean over towers of each variable's gradient, from a list of (gradient, variable) per tower."""
    averaged = []
    for grads_and_vars in zip(*tower_grads, strict=True):
        stacked = tf.concat([tf.expand_dims(grad, 0) for grad, _ in grads_and_vars], axis=0)
        averaged.append((tf.reduce_mean(stacked, axis=0), grads_and_vars[0][1]))
    return averaged


def _convolution(name, inputs, filters, bias):
    with v1.variable_scope(name):
        kernel = _variable("weights", [5, 5, inputs.shape[-1], filters], v1.truncated_normal_initializer(stddev=5e-2))
        biases = _variable("biases", [filters], v1.constant_initializer(bias))
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(inputs, kernel, [1, 1, 1, 1], padding="SAME"), biases))


def _affine(name, inputs, units, stddev, bias, decay):
    with v1.variable_scope(name):
        weights = _variable("weights", [inputs.shape[-1], units], v1.truncated_normal_initializer(stddev=stddev))
        biases = _variable("biases", [units], v1.constant_initializer(bias))
        if decay is not None:
            v1.add_to_collection("losses", decay * tf.nn.l2_loss(weights))
        return tf.matmul(inputs, weights) + biases


def _variable(name, shape, initializer):
    with tf.device("/cpu:0"):
        return v1.get_variable(name, shape, tf.float32, initializer)
